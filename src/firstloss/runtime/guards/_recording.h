/* What a step does while it is traced: which code runs, and which attributes of a types.SimpleNamespace it looks up.
 * Python code would be seen by itself: a profile function in Python for one, which this one in C is instead of.
 * Part of _guards.c, which includes Python.h before it.
 */

/* -- which code runs -- */

#define SEEN (1 << 14)
static void *seen[SEEN]; /* of the one thread that traces */
static void *dull[SEEN]; /* functions written in C of which no more is to be said */
static PyCFunction globals_method;
static Py_tracefunc others_function; /* a profiler's that was at work before */
static PyObject *others_argument;

/* What runs is noted in `found`: (codes, whole, called). */
static int note_code(PyObject *found, PyFrameObject *frame) {
    PyCodeObject *code = PyFrame_GetCode(frame);
    void **place = &seen[((uintptr_t)code >> 5) % SEEN];
    int failed = 0;
    if (*place != code) {
        PyObject *key = PyLong_FromVoidPtr(code), *globals = PyFrame_GetGlobals(frame);
        PyObject *item = key && globals ? PyTuple_Pack(2, code, globals) : NULL;
        failed = item == NULL || PyDict_SetItem(PyTuple_GET_ITEM(found, 0), key, item) < 0;
        Py_XDECREF(key);
        Py_XDECREF(globals);
        Py_XDECREF(item);
        *place = failed ? NULL : code;
    }
    Py_DECREF(code);
    return failed ? -1 : 0;
}

static int note_call(PyObject *found, PyFrameObject *frame, PyObject *function) {
    if (globals_method != NULL && PyCFunction_GET_FUNCTION(function) == globals_method) {
        PyObject *globals = PyFrame_GetGlobals(frame);
        int failed = PyList_Append(PyTuple_GET_ITEM(found, 1), globals) < 0;
        Py_DECREF(globals);
        return failed ? -1 : 0;
    }
    PyMethodDef *definition = ((PyCFunctionObject *)function)->m_ml;
    void **place = &dull[((uintptr_t)definition >> 5) % SEEN];
    if (*place == definition) return 0;
    PyObject *answer = PyObject_CallFunctionObjArgs(PyTuple_GET_ITEM(found, 2), function, (PyObject *)frame, NULL);
    if (answer == NULL) return -1;
    if (answer == Py_False) *place = definition;
    Py_DECREF(answer);
    return 0;
}

static int note(PyObject *found, PyFrameObject *frame, int what, PyObject *arg) {
    if (what == PyTrace_CALL) return note_code(found, frame);
    if (what == PyTrace_C_CALL && PyCFunction_Check(arg)) return note_call(found, frame, arg);
    return 0;
}

static PyObject *start(PyObject *module, PyObject *args) {
    PyObject *codes, *whole, *called;
    if (!PyArg_ParseTuple(args, "O!O!O", &PyDict_Type, &codes, &PyList_Type, &whole, &called)) return NULL;
    if (globals_method == NULL) {
        PyObject *builtin = PyDict_GetItemString(PyEval_GetBuiltins(), "globals");
        if (builtin != NULL && PyCFunction_Check(builtin)) globals_method = PyCFunction_GET_FUNCTION(builtin);
    }
    PyObject *found = PyTuple_Pack(3, codes, whole, called);
    if (found == NULL) return NULL;
    memset(seen, 0, sizeof seen);
    memset(dull, 0, sizeof dull);
    PyThreadState *thread = PyThreadState_Get();
    others_function = thread->c_profilefunc;
    Py_XSETREF(others_argument, Py_XNewRef(thread->c_profileobj));
    PyEval_SetProfile(note, found);
    Py_DECREF(found);
    Py_RETURN_NONE;
}

static PyObject *stop(PyObject *module, PyObject *unused) {
    PyEval_SetProfile(others_function, others_argument);
    others_function = NULL;
    Py_CLEAR(others_argument);
    Py_RETURN_NONE;
}

/* -- attributes of types.SimpleNamespace, whose class Python code cannot change --

What is set is not noted here: `object.__setattr__` refuses objects whose class has another function for that. */

static PyTypeObject *noted_type;
static getattrofunc plain_lookup;
static richcmpfunc plain_compare;
static reprfunc plain_repr;
static PyObject *noter;

static int note_lookup(PyObject *self, PyObject *name) {
    if (noter == NULL) return 0;
    PyObject *result = PyObject_CallFunctionObjArgs(noter, self, name, NULL);
    if (result == NULL) return -1;
    Py_DECREF(result);
    return 0;
}

/* All attributes at once, as `__dict__` gives them. */
static int note_all(PyObject *self) {
    static PyObject *name;
    if (name == NULL && (name = PyUnicode_InternFromString("__dict__")) == NULL) return -1;
    return note_lookup(self, name);
}

static PyObject *noting_lookup(PyObject *self, PyObject *name) {
    return note_lookup(self, name) < 0 ? NULL : plain_lookup(self, name);
}

static PyObject *noting_compare(PyObject *self, PyObject *other, int operator) {
    if (note_all(self) < 0 || (Py_TYPE(other) == noted_type && note_all(other) < 0)) return NULL;
    return plain_compare(self, other, operator);
}

static PyObject *noting_repr(PyObject *self) {
    return note_all(self) < 0 ? NULL : plain_repr(self);
}

static PyObject *note_attributes(PyObject *module, PyObject *args) {
    PyTypeObject *type;
    PyObject *read;
    if (!PyArg_ParseTuple(args, "O!O", &PyType_Type, &type, &read)) return NULL;
    if (noted_type == NULL) {
        noted_type = (PyTypeObject *)Py_NewRef((PyObject *)type);
        plain_lookup = type->tp_getattro;
        plain_compare = type->tp_richcompare;
        plain_repr = type->tp_repr;
    } else if (noted_type != type) {
        PyErr_SetString(PyExc_ValueError, "one type only");
        return NULL;
    }
    Py_XSETREF(noter, read == Py_None ? NULL : Py_NewRef(read));
    type->tp_getattro = noter == NULL ? plain_lookup : noting_lookup;
    type->tp_richcompare = noter == NULL ? plain_compare : noting_compare;
    type->tp_repr = noter == NULL ? plain_repr : noting_repr;
    PyType_Modified(type);
    Py_RETURN_NONE;
}
