"""The dashboard: one page on the management listener.

sources: the data of the server; seconds: a reading of one second; feed: sends readings to viewers;
page: its files and routes. The page's source is `dashboard/` of the repository; `make dashboard`
builds it into `static/`.
"""
