/* What guards ask at every call, without a Python instruction for each: have these dicts, lists, variables and classes
 * changed? And which code runs while a step is traced.
 *
 * A dict tells by its version, which Python counts up whenever the dict changes. That is private to Python 3.11 to 3.13:
 * `versions_work` tries it out before it is trusted, and guard_set.py does without where it does not work.
 *
 * A Watch borrows what it looks at; whoever makes one keeps those objects alive.
 */

#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <frameobject.h>

#if defined(__GNUC__)
#pragma GCC diagnostic ignored "-Wdeprecated-declarations"
#endif

static uint64_t version_of(PyObject *dict) { return ((PyDictObject *)dict)->ma_version_tag; }

typedef struct {
    PyObject *list;
    PyObject **items; /* borrowed */
    Py_ssize_t count;
} List;

typedef struct {
    PyObject *object; /* a cell and its content, or an object and its class */
    PyObject *held;
} Pair;

typedef struct {
    PyObject_HEAD
    PyObject **dicts;
    uint64_t *versions;
    Py_ssize_t n_dicts;
    List *lists;
    Py_ssize_t n_lists;
    Pair *cells;
    Py_ssize_t n_cells;
    Pair *objects;
    Py_ssize_t n_objects;
} Watch;

static void watch_dealloc(Watch *self) {
    PyMem_Free(self->dicts);
    PyMem_Free(self->versions);
    for (Py_ssize_t i = 0; i < self->n_lists; i++) PyMem_Free(self->lists[i].items);
    PyMem_Free(self->lists);
    PyMem_Free(self->cells);
    PyMem_Free(self->objects);
    PyTypeObject *type = Py_TYPE(self);
    type->tp_free((PyObject *)self);
    Py_DECREF(type);
}

/* A list of pairs (object, held) as an array; -1 with an error set if it is none. */
static int pairs_of(PyObject *list, Pair **out, Py_ssize_t *count) {
    Py_ssize_t n = PyList_GET_SIZE(list);
    *out = PyMem_Calloc(n ? n : 1, sizeof(Pair));
    if (*out == NULL) {
        PyErr_NoMemory();
        return -1;
    }
    for (Py_ssize_t i = 0; i < n; i++) {
        PyObject *pair = PyList_GET_ITEM(list, i);
        if (!PyTuple_Check(pair) || PyTuple_GET_SIZE(pair) != 2) {
            PyErr_SetString(PyExc_TypeError, "a pair is a tuple of two");
            return -1;
        }
        (*out)[i].object = PyTuple_GET_ITEM(pair, 0);
        (*out)[i].held = PyTuple_GET_ITEM(pair, 1);
    }
    *count = n;
    return 0;
}

static PyObject *watch_new(PyTypeObject *type, PyObject *args, PyObject *kwargs) {
    PyObject *dicts, *lists, *cells, *objects;
    if (!PyArg_ParseTuple(args, "O!O!O!O!", &PyList_Type, &dicts, &PyList_Type, &lists, &PyList_Type, &cells,
                          &PyList_Type, &objects))
        return NULL;
    Watch *self = (Watch *)type->tp_alloc(type, 0);
    if (self == NULL) return NULL;
    Py_ssize_t n = PyList_GET_SIZE(dicts);
    self->dicts = PyMem_Calloc(n ? n : 1, sizeof(PyObject *));
    self->versions = PyMem_Calloc(n ? n : 1, sizeof(uint64_t));
    Py_ssize_t m = PyList_GET_SIZE(lists);
    self->lists = PyMem_Calloc(m ? m : 1, sizeof(List));
    if (self->dicts == NULL || self->versions == NULL || self->lists == NULL) {
        PyErr_NoMemory();
        goto fail;
    }
    self->n_dicts = n;
    for (Py_ssize_t i = 0; i < n; i++) {
        PyObject *dict = PyList_GET_ITEM(dicts, i);
        if (!PyDict_Check(dict)) {
            PyErr_SetString(PyExc_TypeError, "not a dict");
            goto fail;
        }
        self->dicts[i] = dict;
        self->versions[i] = version_of(dict);
    }
    self->n_lists = m;
    for (Py_ssize_t i = 0; i < m; i++) {
        PyObject *list = PyList_GET_ITEM(lists, i);
        if (!PyList_Check(list)) {
            PyErr_SetString(PyExc_TypeError, "not a list");
            goto fail;
        }
        Py_ssize_t count = PyList_GET_SIZE(list);
        self->lists[i].list = list;
        self->lists[i].count = count;
        self->lists[i].items = PyMem_Calloc(count ? count : 1, sizeof(PyObject *));
        if (self->lists[i].items == NULL) {
            PyErr_NoMemory();
            goto fail;
        }
        for (Py_ssize_t j = 0; j < count; j++) self->lists[i].items[j] = PyList_GET_ITEM(list, j);
    }
    if (pairs_of(cells, &self->cells, &self->n_cells) < 0 || pairs_of(objects, &self->objects, &self->n_objects) < 0)
        goto fail;
    for (Py_ssize_t i = 0; i < self->n_cells; i++)
        if (!PyCell_Check(self->cells[i].object)) {
            PyErr_SetString(PyExc_TypeError, "not a cell");
            goto fail;
        }
    return (PyObject *)self;
fail:
    Py_DECREF(self);
    return NULL;
}

static int list_changed(const List *list) {
    if (PyList_GET_SIZE(list->list) != list->count) return 1;
    for (Py_ssize_t i = 0; i < list->count; i++)
        if (PyList_GET_ITEM(list->list, i) != list->items[i]) return 1;
    return 0;
}

static PyObject *numbered(Py_ssize_t n, PyObject *found, char kind) {
    PyObject *item = Py_BuildValue("(Cn)", kind, n);
    if (item == NULL || PyList_Append(found, item) < 0) {
        Py_XDECREF(item);
        return NULL;
    }
    Py_DECREF(item);
    return found;
}

/* None if nothing has changed; else a list of (kind, number): which dicts 'd', lists 'l', cells 'c', objects 'o'. */
static PyObject *watch_changed(Watch *self, PyObject *unused) {
    uint64_t differ = 0; /* without a branch for each: the loads do not wait for one another */
    for (Py_ssize_t i = 0; i < self->n_dicts; i++) differ |= version_of(self->dicts[i]) ^ self->versions[i];
    uintptr_t other = 0;
    for (Py_ssize_t i = 0; i < self->n_cells; i++)
        other |= (uintptr_t)PyCell_GET(self->cells[i].object) ^ (uintptr_t)self->cells[i].held;
    for (Py_ssize_t i = 0; i < self->n_objects; i++)
        other |= (uintptr_t)Py_TYPE(self->objects[i].object) ^ (uintptr_t)self->objects[i].held;
    int lists = 0;
    for (Py_ssize_t i = 0; i < self->n_lists; i++) lists |= list_changed(&self->lists[i]);
    if (!differ && !other && !lists) Py_RETURN_NONE;
    PyObject *found = PyList_New(0);
    if (found == NULL) return NULL;
    for (Py_ssize_t i = 0; i < self->n_dicts; i++)
        if (version_of(self->dicts[i]) != self->versions[i] && !numbered(i, found, 'd')) goto fail;
    for (Py_ssize_t i = 0; i < self->n_lists; i++)
        if (list_changed(&self->lists[i]) && !numbered(i, found, 'l')) goto fail;
    for (Py_ssize_t i = 0; i < self->n_cells; i++)
        if (PyCell_GET(self->cells[i].object) != self->cells[i].held && !numbered(i, found, 'c')) goto fail;
    for (Py_ssize_t i = 0; i < self->n_objects; i++)
        if ((PyObject *)Py_TYPE(self->objects[i].object) != self->objects[i].held && !numbered(i, found, 'o'))
            goto fail;
    return found;
fail:
    Py_DECREF(found);
    return NULL;
}

/* Something has changed, but nothing that counts: from here on it is compared with what it is now. */
static PyObject *watch_settle(Watch *self, PyObject *args) {
    int kind;
    Py_ssize_t i;
    if (!PyArg_ParseTuple(args, "Cn", &kind, &i)) return NULL;
    Py_ssize_t count = kind == 'd' ? self->n_dicts : kind == 'l' ? self->n_lists : kind == 'c' ? self->n_cells : 0;
    if (i < 0 || i >= count) {
        PyErr_SetString(PyExc_IndexError, "no such thing is watched");
        return NULL;
    }
    if (kind == 'd') {
        self->versions[i] = version_of(self->dicts[i]);
    } else if (kind == 'c') {
        self->cells[i].held = PyCell_GET(self->cells[i].object);
    } else {
        List *list = &self->lists[i];
        Py_ssize_t n = PyList_GET_SIZE(list->list);
        if (n != list->count) {
            PyErr_SetString(PyExc_ValueError, "a list of another length");
            return NULL;
        }
        for (Py_ssize_t j = 0; j < n; j++) list->items[j] = PyList_GET_ITEM(list->list, j);
    }
    Py_RETURN_NONE;
}

static PyMethodDef watch_methods[] = {
    {"changed", (PyCFunction)watch_changed, METH_NOARGS, "None, or what has changed as a list of (kind, number)."},
    {"settle", (PyCFunction)watch_settle, METH_VARARGS, "settle(kind, number): compare it with what it is now from here on."},
    {NULL},
};

static PyType_Slot watch_slots[] = {
    {Py_tp_new, watch_new},
    {Py_tp_dealloc, watch_dealloc},
    {Py_tp_methods, watch_methods},
    {Py_tp_doc, "Watch(dicts, lists, cells, objects): whether any of these has changed since."},
    {0, NULL},
};

static PyType_Spec watch_spec = {"firstloss.runtime.guards._guards.Watch", sizeof(Watch), 0, Py_TPFLAGS_DEFAULT,
                                 watch_slots};

static PyObject *dict_version(PyObject *module, PyObject *dict) {
    if (!PyDict_Check(dict)) {
        PyErr_SetString(PyExc_TypeError, "not a dict");
        return NULL;
    }
    return PyLong_FromUnsignedLongLong(version_of(dict));
}

static PyObject *same_items(PyObject *module, PyObject *args) {
    PyObject *a, *b;
    if (!PyArg_ParseTuple(args, "O!O!", &PyList_Type, &a, &PyList_Type, &b)) {
        return NULL;
    }
    Py_ssize_t n = PyList_GET_SIZE(a);
    if (n != PyList_GET_SIZE(b)) {
        Py_RETURN_FALSE;
    }
    return PyBool_FromLong(
        n == 0 || memcmp(((PyListObject *)a)->ob_item, ((PyListObject *)b)->ob_item, n * sizeof(PyObject *)) == 0);
}

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

static PyMethodDef methods[] = {
    {"note_attributes", note_attributes, METH_VARARGS,
     "note_attributes(type, read): call read(object, name) before each look-up of an attribute, with \"__dict__\" where "
     "all are compared or shown; None for no more."},
    {"dict_version", dict_version, METH_O, "A number that is another one after each change of the dict."},
    {"same_items", same_items, METH_VARARGS, "same_items(a, b): whether two lists hold the same objects."},
    {"start", start, METH_VARARGS,
     "start(codes, whole, called): note in `codes`, by its address, the code that this thread runs from here on, with "
     "its globals; in `whole` the globals of code that asks for all of them; and call called(function, frame) before "
     "each call of a function written in C, until it gives False for it. A profiler waits meanwhile."},
    {"stop", stop, METH_NOARGS, "Note no more."},
    {NULL},
};

static struct PyModuleDef definition = {PyModuleDef_HEAD_INIT, "_guards", NULL, -1, methods};

PyMODINIT_FUNC PyInit__guards(void) {
    PyObject *module = PyModule_Create(&definition);
    if (module == NULL) return NULL;
    PyObject *type = PyType_FromSpec(&watch_spec);
    if (type == NULL || PyModule_AddObject(module, "Watch", type) < 0) {
        Py_XDECREF(type);
        Py_DECREF(module);
        return NULL;
    }
    return module;
}
