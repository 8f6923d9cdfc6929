/* Guard checks that run at every call, without a Python instruction for each: whether dicts, lists, closure cells,
 * objects' classes and functions have changed. Recording during a trace is in _recording.h.
 *
 * Changes of dicts are detected by their version tag, which is private to Python 3.11 to 3.13: `_versions_work` in
 * guard_set.py tests it before it is trusted, and there is a fallback.
 *
 * A Watch borrows references to the dicts, lists, cells, objects and functions that it watches; its creator keeps
 * them alive. It owns the values that it compares by address, so that their addresses are not reused.
 */

#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <frameobject.h>

#if defined(__GNUC__)
#pragma GCC diagnostic ignored "-Wdeprecated-declarations"
#endif

#include "_recording.h"

static uint64_t version_of(PyObject *dict) { return ((PyDictObject *)dict)->ma_version_tag; }

typedef struct {
    PyObject *dict; /* borrowed */
    uint64_t version;
} Dict;

typedef struct {
    PyObject *list; /* borrowed */
    PyObject **items;
    Py_ssize_t count;
} List;

typedef struct {
    PyObject *object; /* borrowed: a cell and its content, or an object and its class */
    PyObject *held;
} Pair;

typedef struct {
    PyFunctionObject *function; /* borrowed */
    PyObject *code, *defaults, *kwdefaults;
    uint64_t version; /* of the latter */
} Function;

typedef struct {
    PyObject_HEAD
    Dict *dicts;
    Py_ssize_t n_dicts;
    List *lists;
    Py_ssize_t n_lists;
    Pair *cells;
    Py_ssize_t n_cells;
    Pair *objects;
    Py_ssize_t n_objects;
    Function *functions;
    Py_ssize_t n_functions;
} Watch;

static int watch_traverse(Watch *self, visitproc visit, void *arg) {
    Py_VISIT(Py_TYPE(self));
    for (Py_ssize_t i = 0; i < self->n_lists; i++)
        for (Py_ssize_t j = 0; j < self->lists[i].count; j++) Py_VISIT(self->lists[i].items[j]);
    for (Py_ssize_t i = 0; i < self->n_cells; i++) Py_VISIT(self->cells[i].held);
    for (Py_ssize_t i = 0; i < self->n_objects; i++) Py_VISIT(self->objects[i].held);
    for (Py_ssize_t i = 0; i < self->n_functions; i++) {
        Py_VISIT(self->functions[i].code);
        Py_VISIT(self->functions[i].defaults);
        Py_VISIT(self->functions[i].kwdefaults);
    }
    return 0;
}

static void release_items(List *list) {
    PyObject **items = list->items;
    Py_ssize_t count = list->count;
    list->items = NULL;
    list->count = 0;
    for (Py_ssize_t j = 0; j < count; j++) Py_DECREF(items[j]);
    PyMem_Free(items);
}

/* The Watch watches nothing afterwards. */
static int watch_clear(Watch *self) {
    Py_ssize_t n = self->n_lists;
    self->n_lists = self->n_dicts = 0;
    for (Py_ssize_t i = 0; i < n; i++) release_items(&self->lists[i]);
    n = self->n_cells;
    self->n_cells = 0;
    for (Py_ssize_t i = 0; i < n; i++) Py_CLEAR(self->cells[i].held);
    n = self->n_objects;
    self->n_objects = 0;
    for (Py_ssize_t i = 0; i < n; i++) Py_CLEAR(self->objects[i].held);
    n = self->n_functions;
    self->n_functions = 0;
    for (Py_ssize_t i = 0; i < n; i++) {
        Py_CLEAR(self->functions[i].code);
        Py_CLEAR(self->functions[i].defaults);
        Py_CLEAR(self->functions[i].kwdefaults);
    }
    return 0;
}

static void watch_dealloc(Watch *self) {
    PyObject_GC_UnTrack(self);
    watch_clear(self);
    PyMem_Free(self->dicts);
    PyMem_Free(self->lists);
    PyMem_Free(self->cells);
    PyMem_Free(self->objects);
    PyMem_Free(self->functions);
    PyTypeObject *type = Py_TYPE(self);
    type->tp_free((PyObject *)self);
    Py_DECREF(type);
}

/* Allocates one entry of `size` for each item of `list`; -1 with an error set on failure. */
static int space_for(PyObject *list, size_t size, void *out) {
    Py_ssize_t n = PyList_GET_SIZE(list);
    *(void **)out = PyMem_Calloc(n ? n : 1, size);
    if (*(void **)out != NULL) return 0;
    PyErr_NoMemory();
    return -1;
}

static int type_error(const char *message) {
    PyErr_SetString(PyExc_TypeError, message);
    return -1;
}

/* Converts a list of pairs (object, held) to an array; -1 with an error set on failure. */
static int pairs_of(PyObject *list, Pair **out, Py_ssize_t *count) {
    if (space_for(list, sizeof(Pair), out) < 0) return -1;
    for (Py_ssize_t i = 0; i < PyList_GET_SIZE(list); i++) {
        PyObject *pair = PyList_GET_ITEM(list, i);
        if (!PyTuple_Check(pair) || PyTuple_GET_SIZE(pair) != 2) return type_error("expected tuples of two");
        (*out)[i].object = PyTuple_GET_ITEM(pair, 0);
        (*out)[i].held = Py_NewRef(PyTuple_GET_ITEM(pair, 1));
        *count = i + 1;
    }
    return 0;
}

static int dicts_of(Watch *self, PyObject *list) {
    if (space_for(list, sizeof(Dict), &self->dicts) < 0) return -1;
    for (Py_ssize_t i = 0; i < PyList_GET_SIZE(list); i++) {
        PyObject *dict = PyList_GET_ITEM(list, i);
        if (!PyDict_Check(dict)) return type_error("not a dict");
        self->dicts[i] = (Dict){dict, version_of(dict)};
        self->n_dicts = i + 1;
    }
    return 0;
}

static int hold_items(List *list) {
    Py_ssize_t count = PyList_GET_SIZE(list->list);
    list->items = PyMem_Calloc(count ? count : 1, sizeof(PyObject *));
    if (list->items == NULL) {
        PyErr_NoMemory();
        return -1;
    }
    list->count = count;
    for (Py_ssize_t j = 0; j < count; j++) list->items[j] = Py_NewRef(PyList_GET_ITEM(list->list, j));
    return 0;
}

static int lists_of(Watch *self, PyObject *lists) {
    if (space_for(lists, sizeof(List), &self->lists) < 0) return -1;
    for (Py_ssize_t i = 0; i < PyList_GET_SIZE(lists); i++) {
        self->lists[i].list = PyList_GET_ITEM(lists, i);
        if (!PyList_Check(self->lists[i].list)) return type_error("not a list");
        if (hold_items(&self->lists[i]) < 0) return -1;
        self->n_lists = i + 1;
    }
    return 0;
}

static void hold_definition(Function *function) {
    PyFunctionObject *now = function->function;
    Py_XSETREF(function->code, Py_XNewRef(now->func_code));
    Py_XSETREF(function->defaults, Py_XNewRef(now->func_defaults));
    Py_XSETREF(function->kwdefaults, Py_XNewRef(now->func_kwdefaults));
    function->version = now->func_kwdefaults == NULL ? 0 : version_of(now->func_kwdefaults);
}

static int functions_of(Watch *self, PyObject *list) {
    if (space_for(list, sizeof(Function), &self->functions) < 0) return -1;
    for (Py_ssize_t i = 0; i < PyList_GET_SIZE(list); i++) {
        PyObject *function = PyList_GET_ITEM(list, i);
        if (!PyFunction_Check(function)) return type_error("not a function");
        self->functions[i].function = (PyFunctionObject *)function;
        hold_definition(&self->functions[i]);
        self->n_functions = i + 1;
    }
    return 0;
}

static PyObject *watch_new(PyTypeObject *type, PyObject *args, PyObject *kwargs) {
    PyObject *dicts, *lists, *cells, *objects, *functions;
    if (!PyArg_ParseTuple(args, "O!O!O!O!O!", &PyList_Type, &dicts, &PyList_Type, &lists, &PyList_Type, &cells,
                          &PyList_Type, &objects, &PyList_Type, &functions))
        return NULL;
    Watch *self = (Watch *)type->tp_alloc(type, 0);
    if (self == NULL) return NULL;
    if (dicts_of(self, dicts) < 0 || lists_of(self, lists) < 0 || pairs_of(cells, &self->cells, &self->n_cells) < 0 ||
        pairs_of(objects, &self->objects, &self->n_objects) < 0 || functions_of(self, functions) < 0)
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

static int function_changed(const Function *function) {
    PyFunctionObject *now = function->function;
    return now->func_code != function->code || now->func_defaults != function->defaults ||
           now->func_kwdefaults != function->kwdefaults ||
           (now->func_kwdefaults != NULL && version_of(now->func_kwdefaults) != function->version);
}

static PyObject *append_index(Py_ssize_t n, PyObject *found, char kind) {
    PyObject *item = Py_BuildValue("(Cn)", kind, n);
    if (item == NULL || PyList_Append(found, item) < 0) {
        Py_XDECREF(item);
        return NULL;
    }
    Py_DECREF(item);
    return found;
}

/* None if nothing has changed; else a list of (kind, index): 'd' for dicts, 'l' for lists, 'c' for cells, 'o' for
 * objects, 'f' for functions. */
static PyObject *watch_changed(Watch *self, PyObject *unused) {
    uint64_t differ = 0; /* accumulated without branches, so that the loads do not wait for one another */
    for (Py_ssize_t i = 0; i < self->n_dicts; i++)
        differ |= version_of(self->dicts[i].dict) ^ self->dicts[i].version;
    uintptr_t other = 0;
    for (Py_ssize_t i = 0; i < self->n_cells; i++)
        other |= (uintptr_t)PyCell_GET(self->cells[i].object) ^ (uintptr_t)self->cells[i].held;
    for (Py_ssize_t i = 0; i < self->n_objects; i++)
        other |= (uintptr_t)Py_TYPE(self->objects[i].object) ^ (uintptr_t)self->objects[i].held;
    int some = 0;
    for (Py_ssize_t i = 0; i < self->n_lists; i++) some |= list_changed(&self->lists[i]);
    for (Py_ssize_t i = 0; i < self->n_functions; i++) some |= function_changed(&self->functions[i]);
    if (!differ && !other && !some) Py_RETURN_NONE;
    PyObject *found = PyList_New(0);
    if (found == NULL) return NULL;
    for (Py_ssize_t i = 0; i < self->n_dicts; i++)
        if (version_of(self->dicts[i].dict) != self->dicts[i].version && !append_index(i, found, 'd')) goto fail;
    for (Py_ssize_t i = 0; i < self->n_lists; i++)
        if (list_changed(&self->lists[i]) && !append_index(i, found, 'l')) goto fail;
    for (Py_ssize_t i = 0; i < self->n_cells; i++)
        if (PyCell_GET(self->cells[i].object) != self->cells[i].held && !append_index(i, found, 'c')) goto fail;
    for (Py_ssize_t i = 0; i < self->n_objects; i++)
        if ((PyObject *)Py_TYPE(self->objects[i].object) != self->objects[i].held && !append_index(i, found, 'o'))
            goto fail;
    for (Py_ssize_t i = 0; i < self->n_functions; i++)
        if (function_changed(&self->functions[i]) && !append_index(i, found, 'f')) goto fail;
    return found;
fail:
    Py_DECREF(found);
    return NULL;
}

/* Accepts a change that does not matter: later checks compare with the present state. */
static PyObject *watch_settle(Watch *self, PyObject *args) {
    int kind;
    Py_ssize_t i;
    if (!PyArg_ParseTuple(args, "Cn", &kind, &i)) return NULL;
    Py_ssize_t count = kind == 'd'   ? self->n_dicts
                       : kind == 'l' ? self->n_lists
                       : kind == 'c' ? self->n_cells
                       : kind == 'f' ? self->n_functions
                                     : 0;
    if (i < 0 || i >= count) {
        PyErr_SetString(PyExc_IndexError, "index out of range");
        return NULL;
    }
    if (kind == 'd') {
        self->dicts[i].version = version_of(self->dicts[i].dict);
    } else if (kind == 'c') {
        Py_XSETREF(self->cells[i].held, Py_XNewRef(PyCell_GET(self->cells[i].object)));
    } else if (kind == 'f') {
        hold_definition(&self->functions[i]);
    } else {
        List *list = &self->lists[i], before = *list;
        if (PyList_GET_SIZE(list->list) != list->count) {
            PyErr_SetString(PyExc_ValueError, "the list's length has changed");
            return NULL;
        }
        if (hold_items(list) < 0) {
            *list = before;
            return NULL;
        }
        release_items(&before);
    }
    Py_RETURN_NONE;
}

static PyMethodDef watch_methods[] = {
    {"changed", (PyCFunction)watch_changed, METH_NOARGS, "None, or a list of (kind, index) of what has changed."},
    {"settle", (PyCFunction)watch_settle, METH_VARARGS,
     "settle(kind, index): compare with the present state from here on."},
    {NULL},
};

static PyType_Slot watch_slots[] = {
    {Py_tp_new, watch_new},
    {Py_tp_traverse, watch_traverse},
    {Py_tp_clear, watch_clear},
    {Py_tp_dealloc, watch_dealloc},
    {Py_tp_methods, watch_methods},
    {Py_tp_doc, "Watch(dicts, lists, cells, objects, functions): detects changes of any of these since its creation."},
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
     "recording_method(found, thread, through, runtime, looks_inside, method): a method that counts each access by code "
     "of `thread` in found[id(object), name], a tuple of the object and a dict by (code, offset), and calls `method`. "
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
