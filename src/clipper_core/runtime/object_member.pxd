# Attributes of Python objects that are plain members of their type, as those of msgspec structs and
# of classes with __slots__: read from where they lie, after the type was looked at once. Declared
# from object_member.hpp. Other attributes are read by name, as Python reads them.
#
# Threads: any, with the GIL.
cdef extern from "runtime/object_member.hpp" namespace "clipper":
    cdef cppclass ObjectMember:
        const char* name        # a constant; of one attribute
    object read_member(ObjectMember* member, object of)
