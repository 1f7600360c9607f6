"""gRPC: the server and its services. Needs the extra `grpc`."""
