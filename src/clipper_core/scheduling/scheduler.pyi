from enum import IntEnum

class EngineEvent(IntEnum):
    HELLO_RECEIVED = 1
    ATTACHED = 2
    DISCONNECTED = 3
    CONNECTION_REJECTED = 4
    CALL_RECEIVED = 5
    CALL_CANCELLED = 6
