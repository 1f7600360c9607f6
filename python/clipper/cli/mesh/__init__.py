"""Commands for the nodes of a mesh and the models on them."""
