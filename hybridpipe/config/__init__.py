"""Config: what the user asks for: the TOML file, and the options that it shares with `Trainer`."""
