"""Redis Streams: records scored, feedback learned, models deployed."""
