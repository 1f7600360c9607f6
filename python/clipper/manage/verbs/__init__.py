"""The verbs of management, each declared once, and the methods of clients that follow."""
