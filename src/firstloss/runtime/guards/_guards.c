/* Guard checks that run at every call, without a Python instruction for each: whether dicts, lists, closure cells,
 * objects' classes and functions have changed. Recording during a trace is in _recording.h.
 *
 * Changes of dicts are detected by their version tag, which is private to Python 3.11 to 3.13: `_versions_work` in
 * guard_set.py tests it before it is trusted, and there is a fallback.
 *
 * A Watch borrows references to the objects that it watches; its creator keeps them alive. It owns the values that it compares by address, so that their addresses are not reused.
 */

#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <assert.h>
#include <frameobject.h>
#include <stddef.h>

#if defined(__GNUC__)
#pragma GCC diagnostic ignored "-Wdeprecated-declarations"
#endif

#include "_recording.h"

static uint64_t version_of(PyObject *dict) { return ((PyDictObject *)dict)->ma_version_tag; }

/* An object, and pointers that are compared with those that it held: a list's items, a cell's content, a function's
 * code and defaults, an instance's class. */
typedef struct {
    PyObject *object; /* borrowed */
    enum { DICT, LIST, CELL, FUNCTION, INSTANCE } kind;
    uint64_t version; /* of a dict, or of a function's keyword defaults */
    PyObject **held;  /* owned; some may be NULL */
    Py_ssize_t count;
} Entry;

typedef struct {
    PyObject_HEAD
    Entry *entries;
    Py_ssize_t count;
} Watch;

/* These fields of a function are compared as an array of three. */
static_assert(offsetof(PyFunctionObject, func_kwdefaults) == offsetof(PyFunctionObject, func_code) + 2 * sizeof(void *) &&
                  offsetof(PyFunctionObject, func_defaults) == offsetof(PyFunctionObject, func_code) + sizeof(void *),
              "the layout of functions has changed");

static PyObject **pointers_in(const Entry *entry, Py_ssize_t *count) {
    *count = 1;
    switch (entry->kind) {
    case LIST:
        *count = PyList_GET_SIZE(entry->object);
        return ((PyListObject *)entry->object)->ob_item;
    case CELL:
        return &((PyCellObject *)entry->object)->ob_ref;
    case FUNCTION:
        *count = 3;
        return &((PyFunctionObject *)entry->object)->func_code;
    case INSTANCE:
        return (PyObject **)&entry->object->ob_type;
    default:
        *count = 0;
        return NULL;
    }
}

static uint64_t version_in(const Entry *entry) {
    if (entry->kind == DICT) return version_of(entry->object);
    PyObject *defaults = entry->kind == FUNCTION ? ((PyFunctionObject *)entry->object)->func_kwdefaults : NULL;
    return defaults == NULL ? 0 : version_of(defaults);
}

static int has_changed(const Entry *entry) {
    if (entry->kind == DICT) return version_of(entry->object) != entry->version;
    Py_ssize_t count;
    PyObject **now = pointers_in(entry, &count);
    return count != entry->count || (count && memcmp(now, entry->held, count * sizeof(PyObject *)) != 0) ||
           version_in(entry) != entry->version;
}

static void release(PyObject **held, Py_ssize_t count) {
    for (Py_ssize_t i = 0; i < count; i++) Py_XDECREF(held[i]);
    PyMem_Free(held);
}

/* Compare with the present state from here on; -1 with an error set on failure. */
static int hold(Entry *entry) {
    Py_ssize_t count, former = entry->count;
    PyObject **now = pointers_in(entry, &count), **held = NULL, **before = entry->held;
    if (count && (held = PyMem_Malloc(count * sizeof(PyObject *))) == NULL) {
        PyErr_NoMemory();
        return -1;
    }
    for (Py_ssize_t i = 0; i < count; i++) held[i] = Py_XNewRef(now[i]);
    entry->version = version_in(entry);
    entry->held = held;
    entry->count = count;
    release(before, former);
    return 0;
}

static int watch_traverse(Watch *self, visitproc visit, void *arg) {
    Py_VISIT(Py_TYPE(self));
    for (Py_ssize_t i = 0; i < self->count; i++)
        for (Py_ssize_t j = 0; j < self->entries[i].count; j++) Py_VISIT(self->entries[i].held[j]);
    return 0;
}

/* The Watch watches nothing afterwards. */
static int watch_clear(Watch *self) {
    Entry *entries = self->entries;
    Py_ssize_t count = self->count;
    self->entries = NULL;
    self->count = 0;
    for (Py_ssize_t i = 0; i < count; i++) release(entries[i].held, entries[i].count);
    PyMem_Free(entries);
    return 0;
}

static void watch_dealloc(Watch *self) {
    PyObject_GC_UnTrack(self);
    watch_clear(self);
    PyTypeObject *type = Py_TYPE(self);
    type->tp_free((PyObject *)self);
    Py_DECREF(type);
}

static int kind_of(PyObject *object) {
    if (PyDict_Check(object)) return DICT;
    if (PyList_Check(object)) return LIST;
    if (PyCell_Check(object)) return CELL;
    if (PyFunction_Check(object)) return FUNCTION;
    PyErr_SetString(PyExc_TypeError, "expected dicts, lists, cells and functions");
    return -1;
}

static PyObject *watch_new(PyTypeObject *type, PyObject *args, PyObject *kwargs) {
    PyObject *objects, *instances;
    if (!PyArg_ParseTuple(args, "O!O!", &PyList_Type, &objects, &PyList_Type, &instances)) return NULL;
    Watch *self = (Watch *)type->tp_alloc(type, 0);
    if (self == NULL) return NULL;
    Py_ssize_t first = PyList_GET_SIZE(objects), count = first + PyList_GET_SIZE(instances);
    self->entries = PyMem_Calloc(count ? count : 1, sizeof(Entry));
    if (self->entries == NULL) {
        PyErr_NoMemory();
        goto fail;
    }
    for (Py_ssize_t i = 0; i < count; i++) {
        Entry *entry = &self->entries[i];
        entry->object = i < first ? PyList_GET_ITEM(objects, i) : PyList_GET_ITEM(instances, i - first);
        int kind = i < first ? kind_of(entry->object) : INSTANCE;
        if (kind < 0) goto fail;
        entry->kind = kind;
        if (hold(entry) < 0) goto fail;
        self->count = i + 1;
    }
    return (PyObject *)self;
fail:
    Py_DECREF(self);
    return NULL;
}

/* None if nothing has changed; else the indices of what has, in the order of the constructor's arguments. */
static PyObject *watch_changed(Watch *self, PyObject *unused) {
    PyObject *found = NULL;
    for (Py_ssize_t i = 0; i < self->count; i++) {
        if (!has_changed(&self->entries[i])) continue;
        if (found == NULL && (found = PyList_New(0)) == NULL) return NULL;
        PyObject *index = PyLong_FromSsize_t(i);
        if (index == NULL || PyList_Append(found, index) < 0) {
            Py_XDECREF(index);
            Py_DECREF(found);
            return NULL;
        }
        Py_DECREF(index);
    }
    return found == NULL ? Py_NewRef(Py_None) : found;
}

/* Accepts a change that does not matter: later checks compare with the present state. */
static PyObject *watch_accept(Watch *self, PyObject *index) {
    Py_ssize_t i = PyLong_AsSsize_t(index);
    if (i == -1 && PyErr_Occurred()) return NULL;
    if (i < 0 || i >= self->count) {
        PyErr_SetString(PyExc_IndexError, "index out of range");
        return NULL;
    }
    if (hold(&self->entries[i]) < 0) return NULL;
    Py_RETURN_NONE;
}

static PyMethodDef watch_methods[] = {
    {"changed", (PyCFunction)watch_changed, METH_NOARGS, "None, or a list of the indices of what has changed."},
    {"accept", (PyCFunction)watch_accept, METH_O, "accept(index): compare with the present state from here on."},
    {NULL},
};

static PyType_Slot watch_slots[] = {
    {Py_tp_new, watch_new},
    {Py_tp_traverse, watch_traverse},
    {Py_tp_clear, watch_clear},
    {Py_tp_dealloc, watch_dealloc},
    {Py_tp_methods, watch_methods},
    {Py_tp_doc, "Watch(objects, instances): detects changes of dicts, lists, cells and functions, and of the classes of "
                "instances, since its creation."},
    {0, NULL},
};

static PyType_Spec watch_spec = {"firstloss.runtime.guards._guards.Watch", sizeof(Watch), 0,
                                 Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC, watch_slots};

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

/* The objects that have a true value in one of these attributes. */
static PyObject *with_any(PyObject *module, PyObject *args) {
    PyObject *objects, *names;
    if (!PyArg_ParseTuple(args, "O!O!", &PyList_Type, &objects, &PyTuple_Type, &names)) return NULL;
    PyObject *found = PyList_New(0);
    for (Py_ssize_t i = 0; found != NULL && i < PyList_GET_SIZE(objects); i++) {
        PyObject *object = Py_NewRef(PyList_GET_ITEM(objects, i)); /* Python code may run within */
        int some = 0;
        for (Py_ssize_t j = 0; !some && j < PyTuple_GET_SIZE(names); j++) {
            PyObject *value = PyObject_GetAttr(object, PyTuple_GET_ITEM(names, j));
            some = value == NULL ? -1 : value == Py_None ? 0 : PyObject_IsTrue(value);
            Py_XDECREF(value);
        }
        if (some < 0 || (some && PyList_Append(found, object) < 0)) Py_CLEAR(found);
        Py_DECREF(object);
    }
    return found;
}

static PyMethodDef methods[] = {
    {"record_attributes", record_attributes, METH_VARARGS,
     "record_attributes(type, read): call read(object, name) before each attribute look-up, with \"__dict__\" where all "
     "are compared or printed; None to stop."},
    {"recording_method", recording_method, METH_VARARGS,
     "recording_method(found, stored, thread, through, runtime, looks_inside, method): a method that counts each access "
     "by code of `thread` in found[id(object), name], a tuple of the object, a dict by (code, offset), and whether "
     "`stored` had such an entry before; and calls `method`. "
     "Skips frames of the file `through`, code in the folder `runtime`, and `__dict__` in files of `looks_inside`."},
    {"dict_version", dict_version, METH_O, "The version tag of a dict, which differs after each change."},
    {"same_items", same_items, METH_VARARGS, "same_items(a, b): whether two lists hold the same objects."},
    {"with_any", with_any, METH_VARARGS,
     "with_any(objects, names): those that have a true value in one of these attributes."},
    {"start", start, METH_VARARGS,
     "start(codes, whole, called): record the code that this thread runs from here on, with its globals, in `codes`, "
     "by its address, and the globals of code that asks for all of them in `whole`; and call called(function, frame) "
     "before each call of a C function, until it returns False for it. Suspends an active profiler."},
    {"stop", stop, METH_NOARGS, "Stop recording."},
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
