"""Tasks and lanes as data; everything is in task.pxd."""
