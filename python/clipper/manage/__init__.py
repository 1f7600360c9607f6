"""What a person does to a running server: one function a verb."""
