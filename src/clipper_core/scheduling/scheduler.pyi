from enum import IntEnum

class Notice(IntEnum):
    SAID_HELLO = 1
    ATTACHED = 2
    GONE = 3
    TURNED_AWAY = 4
