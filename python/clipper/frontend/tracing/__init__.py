"""W3C trace context, spans of requests, and their export by OTLP."""
