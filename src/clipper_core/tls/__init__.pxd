# TLS without the GIL, by the OpenSSL that the interpreter has loaded.
#
# May import: runtime.
#
# `libssl` has the functions of OpenSSL, looked up at run time, and a session: the server's side of
# one connection, bytes in and bytes out. `tls_context` makes contexts of certificates. `relay`
# moves bytes between a client with TLS and a socket of this process, whose other end has them
# without.
#
# Threads: a session and its relay are one thread's; a context is shared.
