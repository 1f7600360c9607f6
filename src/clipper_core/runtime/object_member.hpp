// Attributes of Python objects that are plain members of their type, as those of msgspec structs and
// of classes with __slots__: read from where they lie, after the type was looked at once.
#pragma once

#include <Python.h>
#include <structmember.h>

namespace clipper {

struct ObjectMember {
    const char* name = nullptr;
    PyTypeObject* type = nullptr;  // the last type whose member this is; owned
    Py_ssize_t offset = 0;
};

// Any attribute, by its name; remembers where a plain member lies.
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

// A new reference; nullptr, with an exception, if there is none.
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
