"""The store in an etcd cluster: its address, its channels and its watches."""
