/* Records what a step does while it is traced: which code runs, and which attributes of a types.SimpleNamespace it
 * reads. Written in C because recording functions in Python, such as a profile function, would record themselves.
 * Part of _guards.c, which includes Python.h before it.
 */

/* -- which code runs -- */

#define SEEN (1 << 14)
static void *seen[SEEN]; /* code that was recorded last, by hash; one thread traces at a time */
static void *ignored[SEEN]; /* C functions whose calls need no more recording, by hash */
static PyCFunction globals_method;
static Py_tracefunc suspended_function; /* of the profiler that was active before */
static PyObject *suspended_argument;

/* `found` is a tuple (codes, whole, called); see `start`. */
static int record_code(PyObject *found, PyFrameObject *frame) {
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

static int record_call(PyObject *found, PyFrameObject *frame, PyObject *function) {
    if (globals_method != NULL && PyCFunction_GET_FUNCTION(function) == globals_method) {
        PyObject *globals = PyFrame_GetGlobals(frame);
        int failed = PyList_Append(PyTuple_GET_ITEM(found, 1), globals) < 0;
        Py_DECREF(globals);
        return failed ? -1 : 0;
    }
    PyMethodDef *definition = ((PyCFunctionObject *)function)->m_ml;
    void **place = &ignored[((uintptr_t)definition >> 5) % SEEN];
    if (*place == definition) return 0;
    PyObject *more = PyObject_CallFunctionObjArgs(PyTuple_GET_ITEM(found, 2), function, (PyObject *)frame, NULL);
    if (more == NULL) return -1;
    if (more == Py_False) *place = definition;
    Py_DECREF(more);
    return 0;
}

static int record(PyObject *found, PyFrameObject *frame, int event, PyObject *arg) {
    if (event == PyTrace_CALL) return record_code(found, frame);
    if (event == PyTrace_C_CALL && PyCFunction_Check(arg)) return record_call(found, frame, arg);
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
    memset(ignored, 0, sizeof ignored);
    PyThreadState *thread = PyThreadState_Get();
    suspended_function = thread->c_profilefunc;
    Py_XSETREF(suspended_argument, Py_XNewRef(thread->c_profileobj));
    PyEval_SetProfile(record, found);
    Py_DECREF(found);
    Py_RETURN_NONE;
}

static PyObject *stop(PyObject *module, PyObject *unused) {
    PyEval_SetProfile(suspended_function, suspended_argument);
    suspended_function = NULL;
    Py_CLEAR(suspended_argument);
    Py_RETURN_NONE;
}

/* -- attributes of types.SimpleNamespace, whose class Python code cannot change --

Stores are not recorded: `object.__setattr__` rejects objects whose class has a tp_setattro of its own. */

static PyTypeObject *recorded_type;
static getattrofunc plain_lookup;
static richcmpfunc plain_compare;
static reprfunc plain_repr;
static PyObject *recorder;

static int record_lookup(PyObject *self, PyObject *name) {
    if (recorder == NULL) return 0;
    PyObject *result = PyObject_CallFunctionObjArgs(recorder, self, name, NULL);
    if (result == NULL) return -1;
    Py_DECREF(result);
    return 0;
}

/* Records a read of all attributes. */
static int record_all(PyObject *self) {
    static PyObject *name;
    if (name == NULL && (name = PyUnicode_InternFromString("__dict__")) == NULL) return -1;
    return record_lookup(self, name);
}

static PyObject *recording_lookup(PyObject *self, PyObject *name) {
    return record_lookup(self, name) < 0 ? NULL : plain_lookup(self, name);
}

static PyObject *recording_compare(PyObject *self, PyObject *other, int operator) {
    if (record_all(self) < 0 || (Py_TYPE(other) == recorded_type && record_all(other) < 0)) return NULL;
    return plain_compare(self, other, operator);
}

static PyObject *recording_repr(PyObject *self) {
    return record_all(self) < 0 ? NULL : plain_repr(self);
}

static PyObject *record_attributes(PyObject *module, PyObject *args) {
    PyTypeObject *type;
    PyObject *read;
    if (!PyArg_ParseTuple(args, "O!O", &PyType_Type, &type, &read)) return NULL;
    if (recorded_type == NULL) {
        recorded_type = (PyTypeObject *)Py_NewRef((PyObject *)type);
        plain_lookup = type->tp_getattro;
        plain_compare = type->tp_richcompare;
        plain_repr = type->tp_repr;
    } else if (recorded_type != type) {
        PyErr_SetString(PyExc_ValueError, "one type only");
        return NULL;
    }
    Py_XSETREF(recorder, read == Py_None ? NULL : Py_NewRef(read));
    type->tp_getattro = recorder == NULL ? plain_lookup : recording_lookup;
    type->tp_richcompare = recorder == NULL ? plain_compare : recording_compare;
    type->tp_repr = recorder == NULL ? plain_repr : recording_repr;
    PyType_Modified(type);
    Py_RETURN_NONE;
}
