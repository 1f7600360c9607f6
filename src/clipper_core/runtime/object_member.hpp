// Fast reads of attributes that are members of their type (those of msgspec structs and of classes
// with __slots__): they are read directly from the object, at an offset that is looked up once per
// type.
#pragma once

#include <Python.h>
#include <structmember.h>

namespace clipper {

struct ObjectMember {
    const char* name = nullptr;
    PyTypeObject* type = nullptr;  // the last type whose member this is; owned
    Py_ssize_t offset = 0;
};

// Read an attribute by its name, and remember the offset if it is a member.
inline PyObject* find_member(ObjectMember* member, PyObject* object) {
    PyTypeObject* type = Py_TYPE(object);
    PyObject* found = nullptr;
    if (type->tp_getattro == PyObject_GenericGetAttr) {
        found = PyObject_GetAttrString(reinterpret_cast<PyObject*>(type), member->name);
        if (found == nullptr) PyErr_Clear();
    }
    if (found != nullptr && Py_IS_TYPE(found, &PyMemberDescr_Type)) {
        const PyMemberDef* place = reinterpret_cast<PyMemberDescrObject*>(found)->d_member;
        if (place->type == T_OBJECT_EX) {
            Py_INCREF(type);
            Py_XDECREF(member->type);
            member->type = type;
            member->offset = place->offset;
        }
    }
    Py_XDECREF(found);
    return PyObject_GetAttrString(object, member->name);
}

// Return a new reference; nullptr, with an exception, if there is no such attribute.
inline PyObject* read_member(ObjectMember* member, PyObject* object) {
    if (Py_TYPE(object) == member->type) {
        char* place = reinterpret_cast<char*>(object) + member->offset;
        PyObject* value = *reinterpret_cast<PyObject**>(place);
        if (value != nullptr) {
            Py_INCREF(value);
            return value;
        }
    }
    return find_member(member, object);
}

}  // namespace clipper
