/* Starts compiled Triton kernels, all those of a pass by one call, and describes the layouts of tensors.

   native.py compiles this file with the compiler that Triton needs; `parameters` of
   tests/backends/triton/native_fuzz.py says in Python what a launch reads. Neither torch's nor CUDA's headers are
   needed: native.py passes the addresses of the driver's functions, and torch exports the table of functions below for
   DLPack. */

#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <math.h>
#include <stdint.h>
#include <string.h>

/* DLPack 1.x: https://github.com/dmlc/dlpack. Only what is used here has a type of its own. */
typedef struct {
    void *data;
    int32_t device_type, device_id;
    int32_t ndim;
    uint8_t dtype_code, dtype_bits;
    uint16_t dtype_lanes;
    int64_t *shape, *strides;
    uint64_t byte_offset;
} DLTensor;

typedef struct {
    uint32_t major, minor;
    void *previous;
    void *allocate, *export_managed, *import_managed;
    int (*describe)(void *object, DLTensor *out); /* fails with a Python exception */
    void *current_stream;
} DLPackExchangeAPI;

typedef int (*Launch)(void *, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, void *, void **,
                      void **);
typedef int (*LaunchResident)(void *, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, void *,
                              void **);
typedef int (*Replace)(void *, void *);

enum { DESCRIPTOR_BYTES = 128, ALIGNMENT = 64, ON_STACK = 8192, MOST_KERNELS = 16, MOST_DIMENSIONS = 8 };

static const DLPackExchangeAPI *dlpack;
static PyTypeObject *tensor_type, *parameter_type;
static PyObject *data_ptr_name, *is_neg_name;

/* A value that is written into the parameters at each call. */
typedef struct {
    uint32_t offset;
    char code;               /* of Python's struct, 'P' for a tensor's address, 'D' for a descriptor's */
    int32_t slot;            /* of the arguments of a call */
    int32_t item, inner;     /* indices in the argument, if that is a tuple or holds tuples; -1 for none */
} Value;

typedef struct {
    PyObject_HEAD
    void *function, *launch, *replace;
    unsigned programs, threads, shared;
    int resident;
    Py_ssize_t size, parameter_count, value_count;
    char *contents;
    uint32_t *parameters; /* the offset of each parameter in the contents */
    Value *values;
    PyObject *names; /* of the slots, interned */
} Kernel;

static PyTypeObject KernelType;

static int address_of(PyObject *x, uint64_t *out) {
    if (PyObject_TypeCheck(x, tensor_type)) {
        DLTensor found;
        if (dlpack->describe(x, &found) == 0) {
            *out = (uint64_t)(uintptr_t)found.data + found.byte_offset;
            return 0;
        }
        PyErr_Clear(); /* a dtype that DLPack does not have */
        PyObject *address = PyObject_CallMethodNoArgs(x, data_ptr_name);
        if (address == NULL) return -1;
        *out = PyLong_AsUnsignedLongLong(address);
        Py_DECREF(address);
        return PyErr_Occurred() ? -1 : 0;
    }
    PyErr_Format(PyExc_TypeError, "an argument of a kernel must be a tensor; got %.100s", Py_TYPE(x)->tp_name);
    return -1;
}

/* Writes a number as Python's struct would, in native byte order. */
static int write_number(char code, PyObject *x, char *to) {
    if (code == 'f' || code == 'd') {
        double value = PyFloat_AsDouble(x);
        if (value == -1.0 && PyErr_Occurred()) return -1;
        if (code == 'd') {
            memcpy(to, &value, 8);
            return 0;
        }
        float rounded = (float)value;
        if (isinf(rounded) && !isinf(value)) {
            PyErr_SetString(PyExc_OverflowError, "an argument of a kernel is too large for a float");
            return -1;
        }
        memcpy(to, &rounded, 4);
        return 0;
    }
    int width;
    switch (code) {
        case 'b': case 'B': width = 1; break;
        case 'h': case 'H': width = 2; break;
        case 'i': case 'I': width = 4; break;
        default: width = 8;
    }
    if (code == 'B' || code == 'H' || code == 'I' || code == 'Q') {
        PyObject *index = PyNumber_Index(x);
        if (index == NULL) return -1;
        unsigned long long value = PyLong_AsUnsignedLongLong(index);
        Py_DECREF(index);
        if (value == (unsigned long long)-1 && PyErr_Occurred()) return -1;
        if (width < 8 && value >> (8 * width)) goto too_large;
        memcpy(to, &value, width); /* little endian, as every host of an NVIDIA GPU */
        return 0;
    }
    long long value = PyLong_AsLongLong(x);
    if (value == -1 && PyErr_Occurred()) return -1;
    if (width < 8 && (value >> (8 * width - 1)) != 0 && (value >> (8 * width - 1)) != -1) goto too_large;
    memcpy(to, &value, width);
    return 0;
too_large:
    PyErr_Format(PyExc_OverflowError, "an argument of a kernel must fit into %d bytes; got %R", width, x);
    return -1;
}

/* A borrowed item of a tuple or list. */
static PyObject *item_of(PyObject *x, Py_ssize_t index) {
    if (!PyTuple_Check(x) && !PyList_Check(x)) {
        PyErr_Format(PyExc_TypeError, "an argument of a kernel must be a tuple; got %.100s", Py_TYPE(x)->tp_name);
        return NULL;
    }
    if (index >= PySequence_Fast_GET_SIZE(x)) {
        PyErr_Format(PyExc_IndexError, "an argument of a kernel has %zd items; item %zd is read",
                     PySequence_Fast_GET_SIZE(x), index);
        return NULL;
    }
    return PySequence_Fast_GET_ITEM(x, index);
}

/* The argument of a slot, borrowed: of a dict by name, of a tuple or list by place. */
static PyObject *argument_of(const Kernel *kernel, PyObject *given, int32_t slot) {
    if (!PyDict_CheckExact(given)) return item_of(given, slot);
    PyObject *name = PyTuple_GET_ITEM(kernel->names, slot), *found = PyDict_GetItemWithError(given, name);
    if (found == NULL && !PyErr_Occurred()) PyErr_SetObject(PyExc_KeyError, name);
    return found;
}

/* Writes the values of slots up to `slots` into a copy of a kernel's contents. Returns CUDA's status, or -1 with a
   Python exception. */
static int write_values(const Kernel *kernel, PyObject *given, int32_t slots, char *to) {
    for (Py_ssize_t i = 0; i < kernel->value_count && kernel->values[i].slot < slots; i++) {
        const Value *value = &kernel->values[i];
        PyObject *x = argument_of(kernel, given, value->slot);
        if (x != NULL && value->item >= 0) x = item_of(x, value->item);
        if (x != NULL && value->inner >= 0) x = item_of(x, value->inner);
        if (x == NULL) return -1;
        if (value->code != 'P' && value->code != 'D') {
            if (write_number(value->code, x, to + value->offset) < 0) return -1;
            continue;
        }
        uint64_t address;
        if (address_of(x, &address) < 0) return -1;
        if (value->code == 'P') {
            memcpy(to + value->offset, &address, 8);
        } else {
            int status = ((Replace)kernel->replace)(to + value->offset, (void *)(uintptr_t)address);
            if (status != 0) return status;
        }
    }
    return 0;
}

static int launch(const Kernel *kernel, unsigned programs, void *stream, void **parameters) {
    if (kernel->resident)
        return ((LaunchResident)kernel->launch)(kernel->function, programs, 1, 1, kernel->threads, 1, 1,
                                                kernel->shared, stream, parameters);
    return ((Launch)kernel->launch)(kernel->function, programs, 1, 1, kernel->threads, 1, 1, kernel->shared, stream,
                                    parameters, NULL);
}

static size_t aligned(size_t size) { return (size + ALIGNMENT - 1) / ALIGNMENT * ALIGNMENT; }

/* Starts kernels one after another. Returns None, or (kernels started, CUDA's status) if the driver refuses one.

   The parameters are copied for each call, so threads do not wait for one another. */
static PyObject *start_all(Kernel **kernels, Py_ssize_t count, const unsigned *programs, PyObject *given,
                           void *stream) {
    char on_stack[ON_STACK], *memory = on_stack, *allocated = NULL;
    void **parameters[MOST_KERNELS];
    size_t size = ALIGNMENT;
    for (Py_ssize_t i = 0; i < count; i++)
        size += aligned(kernels[i]->size) + aligned(sizeof(void *) * kernels[i]->parameter_count);
    if (size > sizeof on_stack) {
        memory = allocated = PyMem_Malloc(size);
        if (memory == NULL) return PyErr_NoMemory();
    }
    memory = (char *)aligned((uintptr_t)memory);
    int status = 0;
    Py_ssize_t started = 0, written = 0;
    for (; written < count; written++) {
        const Kernel *kernel = kernels[written];
        memcpy(memory, kernel->contents, kernel->size);
        status = write_values(kernel, given, INT32_MAX, memory);
        if (status != 0) break;
        parameters[written] = (void **)(memory + aligned(kernel->size));
        for (Py_ssize_t i = 0; i < kernel->parameter_count; i++)
            parameters[written][i] = memory + kernel->parameters[i];
        memory = (char *)parameters[written] + aligned(sizeof(void *) * kernel->parameter_count);
    }
    if (status == 0) {
        Py_BEGIN_ALLOW_THREADS /* the driver waits if too many launches are pending */
        for (; started < count; started++) {
            status = launch(kernels[started], programs[started], stream, parameters[started]);
            if (status != 0) break;
        }
        Py_END_ALLOW_THREADS
    }
    PyMem_Free(allocated);
    if (status == 0) Py_RETURN_NONE;
    return PyErr_Occurred() ? NULL : Py_BuildValue("ni", started, status);
}

static int stream_of(PyObject *x, void **out) {
    *out = PyLong_AsVoidPtr(x);
    return *out == NULL && PyErr_Occurred() ? -1 : 0;
}

static PyObject *start(PyObject *module, PyObject *const *arguments, Py_ssize_t count) {
    if (count != 3 || !PyTuple_CheckExact(arguments[0])) {
        PyErr_SetString(PyExc_TypeError, "start takes a tuple of kernels, their arguments and a stream");
        return NULL;
    }
    Kernel *kernels[MOST_KERNELS];
    unsigned programs[MOST_KERNELS];
    Py_ssize_t kernel_count = PyTuple_GET_SIZE(arguments[0]);
    if (kernel_count > MOST_KERNELS) {
        PyErr_Format(PyExc_ValueError, "start takes at most %d kernels; got %zd", MOST_KERNELS, kernel_count);
        return NULL;
    }
    for (Py_ssize_t i = 0; i < kernel_count; i++) {
        PyObject *each = PyTuple_GET_ITEM(arguments[0], i);
        if (!Py_IS_TYPE(each, &KernelType)) {
            PyErr_Format(PyExc_TypeError, "start takes kernels; got %.100s", Py_TYPE(each)->tp_name);
            return NULL;
        }
        kernels[i] = (Kernel *)each;
        programs[i] = kernels[i]->programs;
    }
    void *stream;
    if (stream_of(arguments[2], &stream) < 0) return NULL;
    return start_all(kernels, kernel_count, programs, arguments[1], stream);
}

static int programs_of(PyObject *number, unsigned *programs) {
    unsigned long given = PyLong_AsUnsignedLong(number);
    if (given == (unsigned long)-1 && PyErr_Occurred()) return -1;
    if (given > UINT32_MAX) {
        PyErr_SetString(PyExc_OverflowError, "the number of programs must fit into 32 bits");
        return -1;
    }
    *programs = (unsigned)given;
    return 0;
}

static PyObject *kernel_start(PyObject *self, PyObject *const *arguments, Py_ssize_t count) {
    if (count != 3) {
        PyErr_SetString(PyExc_TypeError, "Kernel.start takes a number of programs, the arguments and a stream");
        return NULL;
    }
    unsigned programs;
    if (programs_of(arguments[0], &programs) < 0) return NULL;
    void *stream;
    if (stream_of(arguments[2], &stream) < 0) return NULL;
    Kernel *kernel = (Kernel *)self;
    return start_all(&kernel, 1, &programs, arguments[1], stream);
}

static void kernel_free(PyObject *self) {
    Kernel *kernel = (Kernel *)self;
    PyMem_Free(kernel->contents);
    PyMem_Free(kernel->parameters);
    PyMem_Free(kernel->values);
    Py_XDECREF(kernel->names);
    Py_TYPE(self)->tp_free(self);
}

static void *copied(const void *x, size_t size) {
    void *made = PyMem_Malloc(size ? size : 1);
    if (made == NULL) PyErr_NoMemory();
    else memcpy(made, x, size);
    return made;
}

/* A kernel with the same members, whose memory is its own. first: the value, and slot: the slot to begin with. */
static Kernel *copy_of(const Kernel *kernel, Py_ssize_t first, Py_ssize_t slot) {
    Kernel *made = PyObject_New(Kernel, &KernelType);
    if (made == NULL) return NULL;
    memcpy((char *)made + sizeof(PyObject), (const char *)kernel + sizeof(PyObject), sizeof *made - sizeof(PyObject));
    made->value_count -= first;
    made->contents = copied(kernel->contents, kernel->size);
    made->parameters = copied(kernel->parameters, sizeof *made->parameters * kernel->parameter_count);
    made->values = copied(kernel->values + first, sizeof *made->values * made->value_count);
    made->names = PyTuple_GetSlice(kernel->names, slot, PyTuple_GET_SIZE(kernel->names));
    if (made->contents == NULL || made->parameters == NULL || made->values == NULL || made->names == NULL) {
        Py_DECREF(made);
        return NULL;
    }
    for (Py_ssize_t i = 0; i < made->value_count; i++) made->values[i].slot -= (int32_t)slot;
    return made;
}

static PyObject *kernel_bound(PyObject *self, PyObject *const *arguments, Py_ssize_t count) {
    Kernel *kernel = (Kernel *)self;
    if (count != 2 || !PyTuple_CheckExact(arguments[1])) {
        PyErr_SetString(PyExc_TypeError, "Kernel.bound takes a number of programs and a tuple of arguments");
        return NULL;
    }
    unsigned programs;
    if (programs_of(arguments[0], &programs) < 0) return NULL;
    Py_ssize_t slots = PyTuple_GET_SIZE(arguments[1]), first = 0;
    if (slots > PyTuple_GET_SIZE(kernel->names)) {
        PyErr_Format(PyExc_ValueError, "a kernel of %zd arguments was given %zd", PyTuple_GET_SIZE(kernel->names),
                     slots);
        return NULL;
    }
    while (first < kernel->value_count && kernel->values[first].slot < slots) first++;
    Kernel *made = copy_of(kernel, first, slots);
    if (made == NULL) return NULL;
    made->programs = programs;
    int status = write_values(kernel, arguments[1], (int32_t)slots, made->contents);
    if (status != 0) {
        Py_DECREF(made);
        if (!PyErr_Occurred()) PyErr_Format(PyExc_RuntimeError, "the CUDA driver refused a descriptor: %d", status);
        return NULL;
    }
    return (PyObject *)made;
}

/* Whether a value of `size` bytes at `offset` lies within the contents. */
static int lies_in(const Kernel *kernel, long long offset, int size) {
    return offset >= 0 && offset + size <= kernel->size;
}

static int read_parameters(Kernel *kernel, PyObject *offsets) {
    kernel->parameter_count = PyTuple_GET_SIZE(offsets);
    kernel->parameters = PyMem_Malloc(sizeof *kernel->parameters * (kernel->parameter_count + 1));
    if (kernel->parameters == NULL) return PyErr_NoMemory(), -1;
    for (Py_ssize_t i = 0; i < kernel->parameter_count; i++) {
        long long offset = PyLong_AsLongLong(PyTuple_GET_ITEM(offsets, i));
        if (offset == -1 && PyErr_Occurred()) return -1;
        if (!lies_in(kernel, offset, 8)) {
            PyErr_SetString(PyExc_ValueError, "a parameter must lie in the contents");
            return -1;
        }
        kernel->parameters[i] = (uint32_t)offset;
    }
    return 0;
}

static int read_values(Kernel *kernel, PyObject *values) {
    kernel->value_count = PyTuple_GET_SIZE(values);
    kernel->values = PyMem_Malloc(sizeof *kernel->values * (kernel->value_count + 1));
    if (kernel->values == NULL) return PyErr_NoMemory(), -1;
    int32_t before = 0;
    for (Py_ssize_t i = 0; i < kernel->value_count; i++) {
        Value *value = &kernel->values[i];
        unsigned offset;
        int code, slot, item, inner;
        PyObject *each = PyTuple_GET_ITEM(values, i);
        if (!PyTuple_Check(each)) {
            PyErr_SetString(PyExc_TypeError, "a value must be a tuple");
            return -1;
        }
        if (!PyArg_ParseTuple(each, "ICiii", &offset, &code, &slot, &item, &inner)) return -1;
        if (code > 127 || strchr("bBhHiIqQfdPD", code) == NULL || code == 0) {
            PyErr_SetString(PyExc_ValueError, "a value has an unknown code");
            return -1;
        }
        if (slot < before || slot >= PyTuple_GET_SIZE(kernel->names) || item < -1 || inner < -1 ||
            !lies_in(kernel, offset, code == 'D' ? DESCRIPTOR_BYTES : 8)) {
            PyErr_SetString(PyExc_ValueError, "values must lie in the contents and be in the order of their slots");
            return -1;
        }
        *value = (Value){offset, (char)code, slot, item, inner};
        before = slot;
    }
    return 0;
}

static PyObject *kernel_new(PyTypeObject *type, PyObject *arguments, PyObject *keywords) {
    unsigned long long function, launcher, replace;
    unsigned programs, threads, shared;
    int resident;
    const char *contents;
    Py_ssize_t size;
    PyObject *parameters, *values, *names;
    if (keywords != NULL && PyDict_GET_SIZE(keywords)) {
        PyErr_SetString(PyExc_TypeError, "Kernel takes no keyword arguments");
        return NULL;
    }
    if (!PyArg_ParseTuple(arguments, "KKKpIIIy#O!O!O!", &function, &launcher, &replace, &resident, &programs, &threads,
                          &shared, &contents, &size, &PyTuple_Type, &parameters, &PyTuple_Type, &values,
                          &PyTuple_Type, &names))
        return NULL;
    if (launcher == 0 || replace == 0) {
        PyErr_SetString(PyExc_ValueError, "the driver's functions must have addresses");
        return NULL;
    }
    Kernel *made = (Kernel *)type->tp_alloc(type, 0); /* all zeros */
    if (made == NULL) return NULL;
    made->function = (void *)(uintptr_t)function;
    made->launch = (void *)(uintptr_t)launcher;
    made->replace = (void *)(uintptr_t)replace;
    made->resident = resident;
    made->programs = programs;
    made->threads = threads;
    made->shared = shared;
    made->size = size;
    made->names = Py_NewRef(names);
    made->contents = copied(contents, size);
    if (made->contents == NULL || read_parameters(made, parameters) < 0 || read_values(made, values) < 0) {
        Py_DECREF(made);
        return NULL;
    }
    return (PyObject *)made;
}

/* The layouts of tensors as bytes: shape, strides, dtype, device, and the address modulo 16. None if one is not a plain
   tensor with memory of its own. */
static PyObject *layouts(PyObject *module, PyObject *const *tensors, Py_ssize_t count) {
    int64_t found[MOST_KERNELS * (4 + 2 * MOST_DIMENSIONS)];
    Py_ssize_t size = 0;
    if (count > MOST_KERNELS) {
        PyErr_Format(PyExc_ValueError, "layouts takes at most %d tensors; got %zd", MOST_KERNELS, count);
        return NULL;
    }
    for (Py_ssize_t i = 0; i < count; i++) {
        PyObject *x = tensors[i];
        if (Py_TYPE(x) != tensor_type && Py_TYPE(x) != parameter_type) Py_RETURN_NONE;
        PyObject *negated = PyObject_CallMethodNoArgs(x, is_neg_name);
        if (negated == NULL) return NULL;
        Py_DECREF(negated);
        if (negated != Py_False) Py_RETURN_NONE;
        DLTensor t;
        if (dlpack->describe(x, &t) != 0) { /* sparse, without memory, or of a dtype that DLPack does not have */
            PyErr_Clear();
            Py_RETURN_NONE;
        }
        if (t.ndim > MOST_DIMENSIONS || t.strides == NULL) Py_RETURN_NONE;
        found[size++] = t.ndim;
        found[size++] = (int64_t)t.device_type << 32 | (uint32_t)t.device_id;
        found[size++] = t.dtype_code | t.dtype_bits << 8 | (int64_t)t.dtype_lanes << 16;
        found[size++] = ((uintptr_t)t.data + t.byte_offset) % 16;
        memcpy(found + size, t.shape, sizeof(int64_t) * t.ndim);
        size += t.ndim;
        memcpy(found + size, t.strides, sizeof(int64_t) * t.ndim);
        size += t.ndim;
    }
    return PyBytes_FromStringAndSize((char *)found, sizeof(int64_t) * size);
}

/* Takes the types Tensor and Parameter. Must be called before anything else. */
static PyObject *connect(PyObject *module, PyObject *arguments) {
    PyObject *tensor, *parameter;
    if (!PyArg_ParseTuple(arguments, "O!O!", &PyType_Type, &tensor, &PyType_Type, &parameter)) return NULL;
    PyObject *capsule = PyObject_GetAttrString(tensor, "__dlpack_c_exchange_api__");
    if (capsule == NULL) return NULL;
    const DLPackExchangeAPI *api = PyCapsule_GetPointer(capsule, "dlpack_exchange_api");
    Py_DECREF(capsule);
    if (api == NULL) return NULL;
    if (api->major != 1 || api->describe == NULL) {
        PyErr_Format(PyExc_ImportError, "PyTorch exports version %u.%u of DLPack; version 1 is needed", api->major,
                     api->minor);
        return NULL;
    }
    dlpack = api;
    tensor_type = (PyTypeObject *)Py_NewRef(tensor);
    parameter_type = (PyTypeObject *)Py_NewRef(parameter);
    Py_RETURN_NONE;
}

static PyMethodDef kernel_methods[] = {
    {"start", (PyCFunction)(void (*)(void))kernel_start, METH_FASTCALL, NULL},
    {"bound", (PyCFunction)(void (*)(void))kernel_bound, METH_FASTCALL, NULL},
    {NULL},
};

static PyTypeObject KernelType = {
    PyVarObject_HEAD_INIT(NULL, 0).tp_name = "sparseflash.Kernel",
    .tp_basicsize = sizeof(Kernel),
    .tp_flags = Py_TPFLAGS_DEFAULT,
    .tp_new = kernel_new,
    .tp_dealloc = kernel_free,
    .tp_methods = kernel_methods,
};

static PyMethodDef methods[] = {
    {"connect", connect, METH_VARARGS, NULL},
    {"start", (PyCFunction)(void (*)(void))start, METH_FASTCALL, NULL},
    {"layouts", (PyCFunction)(void (*)(void))layouts, METH_FASTCALL, NULL},
    {NULL},
};

static struct PyModuleDef definition = {
    PyModuleDef_HEAD_INIT, "sparseflash_native", NULL, -1, methods, NULL, NULL, NULL, NULL,
};

PyMODINIT_FUNC PyInit_sparseflash_native(void) {
    if (PyType_Ready(&KernelType) < 0) return NULL;
    data_ptr_name = PyUnicode_InternFromString("data_ptr");
    is_neg_name = PyUnicode_InternFromString("is_neg");
    PyObject *module = PyModule_Create(&definition);
    if (module == NULL || data_ptr_name == NULL || is_neg_name == NULL ||
        PyModule_AddObjectRef(module, "Kernel", (PyObject *)&KernelType) < 0) {
        Py_XDECREF(module);
        return NULL;
    }
    return module;
}
