"""Management operations of the mesh: registrations, v-models, explanations and change events."""
