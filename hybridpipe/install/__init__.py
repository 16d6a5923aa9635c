"""Installing: the environment of `launch/setup`, and bundles for machines without a network."""
