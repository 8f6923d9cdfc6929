/* Records what a step does while it is traced: which code runs, and which attributes of objects
 * it accesses. Written in C because recording functions in Python, such as a profile function, would record themselves.
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

/* -- attributes of objects of Python classes, by methods that are put into these classes -- */

/* What a recording method knows, a tuple: see `recording_method`. */
enum { FOUND, STORED, THREAD, THROUGH, RUNTIME, LOOKS_INSIDE, METHOD };

static int begins_with(PyObject *text, PyObject *prefix) {
    return PyUnicode_Tailmatch(text, prefix, 0, PY_SSIZE_T_MAX, -1) == 1;
}

/* Adds one to found[id(owner), name][1][code, offset]; that tuple also holds the owner, and whether it was stored before. */
static int count_access(PyObject *found, PyObject *stored, PyObject *owner, PyObject *name, PyObject *code, int offset) {
    int failed = -1;
    PyObject *id = PyLong_FromVoidPtr(owner), *key = id ? PyTuple_Pack(2, id, name) : NULL;
    PyObject *at = PyLong_FromLong(offset), *site = at ? PyTuple_Pack(2, code, at) : NULL;
    if (key == NULL || site == NULL) goto done;
    PyObject *entry = PyDict_GetItemWithError(found, key);
    if (entry == NULL) {
        if (PyErr_Occurred()) goto done;
        int before = PyDict_Contains(stored, key);
        if (before < 0) goto done;
        PyObject *sites = PyDict_New(), *fresh = sites ? PyTuple_Pack(3, owner, sites, before ? Py_True : Py_False) : NULL;
        Py_XDECREF(sites);
        if (fresh == NULL) goto done;
        int set = PyDict_SetItem(found, key, fresh);
        Py_DECREF(fresh);
        if (set < 0) goto done;
        entry = fresh; /* held by `found` */
    }
    PyObject *sites = PyTuple_GET_ITEM(entry, 1), *known = PyDict_GetItemWithError(sites, site);
    if (known == NULL && PyErr_Occurred()) goto done;
    PyObject *count = PyLong_FromLong(known == NULL ? 1 : PyLong_AsLong(known) + 1);
    if (count == NULL) goto done;
    failed = PyDict_SetItem(sites, site, count);
    Py_DECREF(count);
done:
    Py_XDECREF(id);
    Py_XDECREF(key);
    Py_XDECREF(at);
    Py_XDECREF(site);
    return failed;
}

static int record_access(PyObject *known, PyObject *owner, PyObject *name) {
    if (PyLong_AsUnsignedLong(PyTuple_GET_ITEM(known, THREAD)) != PyThread_get_thread_ident()) return 0;
    PyFrameObject *frame = PyThreadState_GetFrame(PyThreadState_Get());
    PyCodeObject *code = frame == NULL ? NULL : PyFrame_GetCode(frame);
    while (code != NULL && PyUnicode_Compare(code->co_filename, PyTuple_GET_ITEM(known, THROUGH)) == 0) {
        PyFrameObject *back = PyFrame_GetBack(frame);
        if (back == NULL) break;
        Py_SETREF(frame, back);
        Py_SETREF(code, PyFrame_GetCode(frame));
    }
    int failed = 0;
    if (code != NULL && !begins_with(code->co_filename, PyTuple_GET_ITEM(known, RUNTIME))) {
        int skip = PyUnicode_CompareWithASCIIString(name, "__class__") == 0;
        if (PyUnicode_CompareWithASCIIString(name, "__dict__") == 0) {
            PyObject *inside = PyTuple_GET_ITEM(known, LOOKS_INSIDE);
            for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(inside) && !skip; i++)
                skip = begins_with(code->co_filename, PyTuple_GET_ITEM(inside, i));
        }
        if (!skip)
            failed = count_access(PyTuple_GET_ITEM(known, FOUND), PyTuple_GET_ITEM(known, STORED), owner, name,
                                  (PyObject *)code, PyFrame_GetLasti(frame));
    }
    Py_XDECREF(code);
    Py_XDECREF(frame);
    return failed;
}

static PyObject *recorded_access(PyObject *known, PyObject *const *args, Py_ssize_t count) {
    if (count >= 2 && PyUnicode_Check(args[1]) && record_access(known, args[0], args[1]) < 0) return NULL;
    return PyObject_Vectorcall(PyTuple_GET_ITEM(known, METHOD), args, (size_t)count, NULL);
}

static PyMethodDef recorded_access_method = {"recorded_access", (PyCFunction)(void (*)(void))recorded_access,
                                             METH_FASTCALL, NULL};

static PyObject *recording_method(PyObject *module, PyObject *args) {
    PyObject *found, *stored, *thread, *through, *runtime, *inside, *method;
    if (!PyArg_ParseTuple(args, "O!O!O!UUO!O", &PyDict_Type, &found, &PyDict_Type, &stored, &PyLong_Type, &thread,
                          &through, &runtime, &PyTuple_Type, &inside, &method))
        return NULL;
    PyObject *function = PyCFunction_New(&recorded_access_method, args);
    PyObject *result = function == NULL ? NULL : PyInstanceMethod_New(function);
    Py_XDECREF(function);
    return result;
}
