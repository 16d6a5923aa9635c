"""The folder of a training: the files that it leaves, as written and as read, and the page made of them."""
