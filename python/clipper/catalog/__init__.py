"""The catalog: models, their versions, and the applications that query them."""
