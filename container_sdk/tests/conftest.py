import os
import sys

from hypothesis import settings

sys.path.insert(0, os.path.dirname(__file__))  # for fake_server
settings.register_profile("unhurried", deadline=None)
settings.load_profile("unhurried")
