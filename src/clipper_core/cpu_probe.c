/* A module that tells whether this processor has AVX2 and BMI2. It uses neither, nor anything that
   not every x86-64 has, and the stable interface of Python. src/clipper_core/__init__.py loads
   it. */
#include <Python.h>

static PyObject *has_avx2(PyObject *module, PyObject *none) {
    (void) module, (void) none;
    __builtin_cpu_init();
    return PyBool_FromLong(__builtin_cpu_supports("avx2") && __builtin_cpu_supports("bmi2"));
}

static PyMethodDef functions[] = {
    {"has_avx2", has_avx2, METH_NOARGS, "Return whether this processor has AVX2 and BMI2."},
    {NULL, NULL, 0, NULL}};

static PyModuleDef_Slot slots[] = {{0, NULL}};

static PyModuleDef definition = {
    PyModuleDef_HEAD_INIT, "cpu_probe", NULL, 0, functions, slots, NULL, NULL, NULL};

PyMODINIT_FUNC PyInit_cpu_probe(void) { return PyModuleDef_Init(&definition); }
