# Fast reads of attributes of Python objects. Attributes that are members of their type (those of
# msgspec structs and of classes with __slots__) are read directly from the object, at an offset
# that is looked up once per type. Other attributes are read by name, as Python does. Declared from
# object_member.hpp.
#
# Threads: any, with the GIL.
cdef extern from "runtime/object_member.hpp" namespace "clipper":
    cdef cppclass ObjectMember:
        const char* name        # of the attribute; a constant
    object read_member(ObjectMember* member, object of)
