# The messages of ModelInfer (`inference.proto`), without the package protobuf: requests from bytes,
# and responses to bytes. What a request means is read in frontend/inference/protobuf_codec.py.
#
# Threads: any; an object belongs to one thread at a time.
