"""The dashboard: one page on the management listener.

sources: what is read of the server; seconds: what one second shows; feed: who is told of it; page:
its files and routes. The page's source is `dashboard/` of the repository; `make dashboard` builds
it into `static/`.
"""
