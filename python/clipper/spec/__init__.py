"""Specifications: what a person states of a model, an application or a table. Each field is
declared once, in a struct, with its name, type, bounds, default, unit and one sentence. Keywords of
Python, bodies of HTTP and their OpenAPI, the client, options of commands, keys of the file and
tables of the documentation are derived from these fields: see field.py.
"""
