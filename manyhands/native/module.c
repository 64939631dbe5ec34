/* `manyhands.native._native`: core.h for Python. Addresses and lengths are plain integers; the caller keeps the memory
 * alive. Written against the limited API, so that one build works with every Python from 3.11 on. */
#define Py_LIMITED_API 0x030B0000
#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include "core.h"
#include "rows.h"

#define PLANE "manyhands.plane"

static void close_plane(PyObject *capsule) { PyMem_Free(PyCapsule_GetPointer(capsule, PLANE)); }

/* Converters for PyArg_ParseTuple: 1, or 0 with an exception set. */
static int to_plane(PyObject *capsule, void *plane) {
    *(struct mh_plane **)plane = PyCapsule_GetPointer(capsule, PLANE);
    return *(struct mh_plane **)plane != NULL;
}

/* Addresses and structs are passed as bytes. */
struct memory {
    const void *start;
    size_t bytes;
};

static int to_memory(PyObject *object, void *memory) {
    char *bytes;
    Py_ssize_t num_bytes;
    if (PyBytes_AsStringAndSize(object, &bytes, &num_bytes)) return 0;
    *(struct memory *)memory = (struct memory){bytes, (size_t)num_bytes};
    return 1;
}

struct program {
    const int32_t *steps;
    size_t length;
};

/* A program is passed as bytes of int32. */
static int to_program(PyObject *object, void *program) {
    struct memory memory;
    if (!to_memory(object, &memory)) return 0;
    if (memory.bytes % sizeof(int32_t)) {
        PyErr_SetString(PyExc_ValueError, "a program is whole 32-bit numbers");
        return 0;
    }
    *(struct program *)program = (struct program){memory.start, memory.bytes / sizeof(int32_t)};
    return 1;
}

static PyObject *plane_bytes(PyObject *self, PyObject *args) {
    unsigned int world;
    Py_ssize_t area_bytes;
    if (!PyArg_ParseTuple(args, "In:plane_bytes", &world, &area_bytes)) return NULL;
    return PyLong_FromSize_t(mh_plane_bytes(world, (size_t)area_bytes));
}

static PyObject *open_plane(PyObject *self, PyObject *args) {
    unsigned long long base;
    Py_ssize_t bytes, area_bytes;
    unsigned int rank, world;
    if (!PyArg_ParseTuple(args, "KnIIn:open_plane", &base, &bytes, &rank, &world, &area_bytes)) return NULL;
    struct mh_plane *plane = PyMem_Malloc(sizeof *plane);
    if (plane == NULL) return PyErr_NoMemory();
    if (mh_plane_open(plane, (void *)(uintptr_t)base, (size_t)bytes, rank, world, (size_t)area_bytes)) {
        PyMem_Free(plane);
        PyErr_Format(PyExc_ValueError, "%zd bytes are no plane of %u ranks with areas of %zd", bytes, world, area_bytes);
        return NULL;
    }
    PyObject *capsule = PyCapsule_New(plane, PLANE, close_plane);
    if (capsule == NULL) PyMem_Free(plane);
    return capsule;
}

static PyObject *abort_plane(PyObject *self, PyObject *args) {
    unsigned long long base;
    unsigned int world, rank;
    if (!PyArg_ParseTuple(args, "KII:abort_plane", &base, &world, &rank)) return NULL;
    mh_abort((void *)(uintptr_t)base, world, rank);
    Py_RETURN_NONE;
}

static PyObject *lost_rank(PyObject *self, PyObject *args) {
    unsigned long long base;
    if (!PyArg_ParseTuple(args, "K:lost_rank", &base)) return NULL;
    return PyLong_FromLongLong(mh_lost_rank((const void *)(uintptr_t)base));
}

static PyObject *set_purpose(PyObject *self, PyObject *args) {
    struct mh_plane *plane;
    const char *text;
    Py_ssize_t length;
    if (!PyArg_ParseTuple(args, "O&s#:set_purpose", to_plane, &plane, &text, &length)) return NULL;
    mh_set_purpose(plane, text, (size_t)length);
    Py_RETURN_NONE;
}

static PyObject *purpose_of(PyObject *self, PyObject *args) {
    struct mh_plane *plane;
    unsigned int rank;
    if (!PyArg_ParseTuple(args, "O&I:purpose_of", to_plane, &plane, &rank)) return NULL;
    if (rank >= plane->world) return PyErr_Format(PyExc_ValueError, "%u is no rank of %u", rank, plane->world);
    const struct mh_purpose *purpose = mh_purpose_of(plane, rank);
    Py_ssize_t length = purpose->length < MH_PURPOSE_BYTES ? purpose->length : MH_PURPOSE_BYTES;
    return PyUnicode_DecodeUTF8(purpose->text, length, "replace");
}

static PyObject *meet(PyObject *self, PyObject *args) {
    struct mh_plane *plane;
    long long timeout_ns;
    int failed;
    if (!PyArg_ParseTuple(args, "O&L:meet", to_plane, &plane, &timeout_ns)) return NULL;
    Py_BEGIN_ALLOW_THREADS
    failed = mh_meet(plane, timeout_ns);
    Py_END_ALLOW_THREADS
    return PyLong_FromLong(failed);
}

static PyObject *post(PyObject *self, PyObject *args) {
    struct mh_plane *plane;
    unsigned int number;
    if (!PyArg_ParseTuple(args, "O&I:post", to_plane, &plane, &number)) return NULL;
    mh_post(plane, number);
    Py_RETURN_NONE;
}

static PyObject *all_posted(PyObject *self, PyObject *args) {
    struct mh_plane *plane;
    unsigned int number;
    if (!PyArg_ParseTuple(args, "O&I:all_posted", to_plane, &plane, &number)) return NULL;
    return PyBool_FromLong(mh_all_posted(plane, number));
}

static PyObject *wait_posted(PyObject *self, PyObject *args) {
    struct mh_plane *plane;
    unsigned int number;
    long long timeout_ns;
    int failed;
    if (!PyArg_ParseTuple(args, "O&IL:wait_posted", to_plane, &plane, &number, &timeout_ns)) return NULL;
    Py_BEGIN_ALLOW_THREADS
    failed = mh_wait_posted(plane, number, timeout_ns);
    Py_END_ALLOW_THREADS
    return PyLong_FromLong(failed);
}

static PyObject *all_reduce(PyObject *self, PyObject *args) {
    struct mh_plane *plane;
    struct program along;
    unsigned long long data;
    Py_ssize_t count;
    int dtype, failed;
    long long timeout_ns;
    if (!PyArg_ParseTuple(args, "O&KniO&L:all_reduce", to_plane, &plane, &data, &count, &dtype, to_program, &along,
                          &timeout_ns)) {
        return NULL;
    }
    Py_BEGIN_ALLOW_THREADS
    failed = mh_all_reduce(plane, (void *)(uintptr_t)data, (size_t)count, dtype, along.steps, along.length, timeout_ns);
    Py_END_ALLOW_THREADS
    return PyLong_FromLong(failed);
}

static PyObject *reduce_scatter(PyObject *self, PyObject *args) {
    struct mh_plane *plane;
    struct program along;
    unsigned long long output, input;
    Py_ssize_t count;
    int dtype, failed;
    long long timeout_ns;
    if (!PyArg_ParseTuple(args, "O&KKniO&L:reduce_scatter", to_plane, &plane, &output, &input, &count, &dtype,
                          to_program, &along, &timeout_ns)) {
        return NULL;
    }
    Py_BEGIN_ALLOW_THREADS
    failed = mh_reduce_scatter(plane, (void *)(uintptr_t)output, (const void *)(uintptr_t)input, (size_t)count, dtype,
                               along.steps, along.length, timeout_ns);
    Py_END_ALLOW_THREADS
    return PyLong_FromLong(failed);
}

static PyObject *all_gather(PyObject *self, PyObject *args) {
    struct mh_plane *plane;
    unsigned long long output, input;
    Py_ssize_t bytes;
    long long timeout_ns;
    int failed;
    if (!PyArg_ParseTuple(args, "O&KKnL:all_gather", to_plane, &plane, &output, &input, &bytes, &timeout_ns)) return NULL;
    Py_BEGIN_ALLOW_THREADS
    failed = mh_all_gather(plane, (void *)(uintptr_t)output, (const void *)(uintptr_t)input, (size_t)bytes, timeout_ns);
    Py_END_ALLOW_THREADS
    return PyLong_FromLong(failed);
}

static PyObject *broadcast(PyObject *self, PyObject *args) {
    struct mh_plane *plane;
    unsigned long long data;
    Py_ssize_t bytes;
    unsigned int source;
    long long timeout_ns;
    int failed;
    if (!PyArg_ParseTuple(args, "O&KnIL:broadcast", to_plane, &plane, &data, &bytes, &source, &timeout_ns)) return NULL;
    Py_BEGIN_ALLOW_THREADS
    failed = mh_broadcast(plane, (void *)(uintptr_t)data, (size_t)bytes, source, timeout_ns);
    Py_END_ALLOW_THREADS
    return PyLong_FromLong(failed);
}

static PyObject *sum(PyObject *self, PyObject *args) {
    struct program along;
    struct memory sources;
    unsigned long long target;
    Py_ssize_t count;
    int dtype, failed;
    if (!PyArg_ParseTuple(args, "KO&niO&:sum", &target, to_memory, &sources, &count, &dtype, to_program, &along)) {
        return NULL;
    }
    if (mh_item_bytes(dtype) == 0 || mh_check_program(along.steps, along.length, sources.bytes / sizeof(void *))) {
        return PyLong_FromLong(MH_BAD_ARGUMENT);
    }
    Py_BEGIN_ALLOW_THREADS
    failed = mh_sum((void *)(uintptr_t)target, sources.start, along.steps, along.length, (size_t)count, dtype);
    Py_END_ALLOW_THREADS
    return PyLong_FromLong(failed);
}

static PyObject *update(PyObject *self, PyObject *args) {
    struct program along;
    struct memory how, pieces, sources, watch;
    int failed;
    if (!PyArg_ParseTuple(args, "O&O&O&O&O&:update", to_memory, &how, to_memory, &pieces, to_memory, &sources, to_program,
                          &along, to_memory, &watch)) {
        return NULL;
    }
    size_t num_pieces = pieces.bytes / sizeof(struct mh_piece), num_addresses = sources.bytes / sizeof(void *);
    if (how.bytes != sizeof(struct mh_update) || (watch.bytes && watch.bytes != sizeof(struct mh_watch)) || pieces.bytes % sizeof(struct mh_piece) ||
        (num_pieces && (num_addresses == 0 || num_addresses % num_pieces))) {
        PyErr_SetString(PyExc_ValueError, "an update is a struct, pieces are structs, each with as many sources");
        return NULL;
    }
    if (num_pieces == 0) return PyLong_FromLong(0);
    Py_BEGIN_ALLOW_THREADS
    failed = mh_update(how.start, pieces.start, num_pieces, sources.start, num_addresses / num_pieces, along.steps,
                       along.length, watch.bytes ? watch.start : NULL);
    Py_END_ALLOW_THREADS
    return PyLong_FromLong(failed);
}

static PyObject *digest(PyObject *self, PyObject *args) {
    unsigned long long address;
    Py_ssize_t bytes;
    struct mh_digest whole = {0};
    if (!PyArg_ParseTuple(args, "Kn:digest", &address, &bytes)) return NULL;
    Py_BEGIN_ALLOW_THREADS
    mh_digest_add(&whole, (const void *)(uintptr_t)address, (size_t)bytes);
    Py_END_ALLOW_THREADS
    return PyLong_FromUnsignedLongLong(mh_digest_end(&whole));
}

static PyObject *copy(PyObject *self, PyObject *args) {
    unsigned long long to, from;
    Py_ssize_t bytes;
    if (!PyArg_ParseTuple(args, "KKn:copy", &to, &from, &bytes)) return NULL;
    Py_BEGIN_ALLOW_THREADS
    mh_copy((void *)(uintptr_t)to, (const void *)(uintptr_t)from, (size_t)bytes);
    Py_END_ALLOW_THREADS
    Py_RETURN_NONE;
}

static PyObject *int8_encode(PyObject *self, PyObject *args) {
    unsigned long long values, residual, scales, codes;
    Py_ssize_t count, block;
    if (!PyArg_ParseTuple(args, "KKKKnn:int8_encode", &values, &residual, &scales, &codes, &count, &block)) return NULL;
    Py_BEGIN_ALLOW_THREADS
    mh_int8_encode((const float *)(uintptr_t)values, (float *)(uintptr_t)residual, (float *)(uintptr_t)scales,
                   (int8_t *)(uintptr_t)codes, (size_t)count, (size_t)block);
    Py_END_ALLOW_THREADS
    Py_RETURN_NONE;
}

static PyObject *int8_decode(PyObject *self, PyObject *args) {
    unsigned long long scales, codes, values;
    Py_ssize_t count, block;
    int add;
    if (!PyArg_ParseTuple(args, "KKKnnp:int8_decode", &scales, &codes, &values, &count, &block, &add)) return NULL;
    Py_BEGIN_ALLOW_THREADS
    mh_int8_decode((const float *)(uintptr_t)scales, (const int8_t *)(uintptr_t)codes, (float *)(uintptr_t)values,
                   (size_t)count, (size_t)block, add);
    Py_END_ALLOW_THREADS
    Py_RETURN_NONE;
}

static PyObject *bf16_add(PyObject *self, PyObject *args) {
    unsigned long long halves, values;
    Py_ssize_t count;
    if (!PyArg_ParseTuple(args, "KKn:bf16_add", &halves, &values, &count)) return NULL;
    Py_BEGIN_ALLOW_THREADS
    mh_bf16_add((const uint16_t *)(uintptr_t)halves, (float *)(uintptr_t)values, (size_t)count);
    Py_END_ALLOW_THREADS
    Py_RETURN_NONE;
}

static PyObject *allocate_large(PyObject *self, PyObject *args) {
    int fd;
    long long offset;
    Py_ssize_t bytes;
    if (!PyArg_ParseTuple(args, "iLn:allocate_large", &fd, &offset, &bytes)) return NULL;
    Py_BEGIN_ALLOW_THREADS
    mh_allocate_large(fd, offset, (size_t)bytes);
    Py_END_ALLOW_THREADS
    Py_RETURN_NONE;
}

static PyObject *map_again(PyObject *self, PyObject *args) {
    unsigned long long memory;
    Py_ssize_t bytes;
    if (!PyArg_ParseTuple(args, "Kn:map_again", &memory, &bytes)) return NULL;
    return PyLong_FromVoidPtr(mh_map_again((void *)(uintptr_t)memory, (size_t)bytes));
}

static PyObject *unmap(PyObject *self, PyObject *args) {
    unsigned long long memory;
    Py_ssize_t bytes;
    if (!PyArg_ParseTuple(args, "Kn:unmap", &memory, &bytes)) return NULL;
    mh_unmap((void *)(uintptr_t)memory, (size_t)bytes);
    Py_RETURN_NONE;
}

static PyMethodDef methods[] = {
    {"plane_bytes", plane_bytes, METH_VARARGS, "plane_bytes(world, area_bytes): how much memory a plane takes"},
    {"open_plane", open_plane, METH_VARARGS, "open_plane(address, bytes, rank, world, area_bytes): one rank's view"},
    {"abort_plane", abort_plane, METH_VARARGS, "abort_plane(address, world, rank): wake all waiting ranks, for good"},
    {"lost_rank", lost_rank, METH_VARARGS, "lost_rank(address): the rank for which the plane was aborted, or -1"},
    {"set_purpose", set_purpose, METH_VARARGS, "set_purpose(plane, text): why this rank makes the calls that follow"},
    {"purpose_of", purpose_of, METH_VARARGS, "purpose_of(plane, rank): its purpose at the last barrier"},
    {"meet", meet, METH_VARARGS, "meet(plane, timeout_ns): a barrier of all ranks"},
    {"post", post, METH_VARARGS, "post(plane, number): publish all that this rank has written so far"},
    {"all_posted", all_posted, METH_VARARGS, "all_posted(plane, number): whether every rank has posted this number"},
    {"wait_posted", wait_posted, METH_VARARGS, "wait_posted(plane, number, timeout_ns): wait until every rank has"},
    {"all_reduce", all_reduce, METH_VARARGS, "all_reduce(plane, address, count, dtype, program, timeout_ns)"},
    {"reduce_scatter", reduce_scatter, METH_VARARGS,
     "reduce_scatter(plane, output, input, count, dtype, program, timeout_ns)"},
    {"allocate_large", allocate_large, METH_VARARGS, "allocate_large(fd, offset, bytes): in pages of 2 MB, if possible"},
    {"map_again", map_again, METH_VARARGS, "map_again(address, bytes): the same memory so that large pages are used, or 0"},
    {"unmap", unmap, METH_VARARGS, "unmap(address, bytes): undo map_again"},
    {"all_gather", all_gather, METH_VARARGS, "all_gather(plane, output, input, bytes, timeout_ns)"},
    {"broadcast", broadcast, METH_VARARGS, "broadcast(plane, address, bytes, source, timeout_ns)"},
    {"sum", sum, METH_VARARGS, "sum(target, addresses, count, dtype, program): of local memory"},
    {"update", update, METH_VARARGS, "update(how, pieces, addresses, program, watch or empty): gradients to new weights"},
    {"digest", digest, METH_VARARGS, "digest(address, bytes): a 64-bit digest of memory"},
    {"copy", copy, METH_VARARGS, "copy(to, from, bytes): bypasses the caches"},
    {"int8_encode", int8_encode, METH_VARARGS, "int8_encode(values, residual or 0, scales, codes, count, block)"},
    {"int8_decode", int8_decode, METH_VARARGS, "int8_decode(scales, codes, values, count, block, add)"},
    {"bf16_add", bf16_add, METH_VARARGS, "bf16_add(halves, values, count)"},
    {NULL, NULL, 0, NULL},
};

extern PyMethodDef mh_row_methods[]; /* rows_module.c */

static int add_rest(PyObject *module) {
    if (PyModule_AddFunctions(module, mh_row_methods)) return -1;
    static const struct {
        const char *name;
        int value;
    } constants[] = {{"ADD", MH_ADD}, {"ABORTED", MH_ABORTED}, {"BAD_ARGUMENT", MH_BAD_ARGUMENT},
                     {"NO_MEMORY", MH_NO_MEMORY}, {"UNLIKE", MH_UNLIKE}, {"MISSING", MH_MISSING},
                     {"F32", MH_F32}, {"F64", MH_F64},
                     {"BF16", MH_BF16}, {"F16", MH_F16}, {"I64", MH_I64},
                     {"SGD", MH_SGD}, {"ADAM", MH_ADAM}, {"ADAGRAD", MH_ADAGRAD}, {"RMSPROP", MH_RMSPROP},
                     {"ROWS_NO_ROOM", MH_ROWS_NO_ROOM}, {"ROWS_TWICE", MH_ROWS_TWICE},
                     {"ROWS_OLD_NUMBER", MH_ROWS_OLD_NUMBER}, {"ROWS_CHANGING", MH_ROWS_CHANGING},
                     {"ROWS_GONE", MH_ROWS_GONE}, {"ROW_PARTS", MH_ROW_PARTS}};
    for (size_t i = 0; i < sizeof constants / sizeof *constants; i++) {
        if (PyModule_AddIntConstant(module, constants[i].name, constants[i].value)) return -1;
    }
    return 0;
}

static PyModuleDef_Slot slots[] = {{Py_mod_exec, add_rest}, {0, NULL}};

static struct PyModuleDef definition = {
    PyModuleDef_HEAD_INIT, "_native", "Collectives in shared memory, updates of weights, rows of embeddings.", 0, methods, slots, NULL, NULL, NULL,
};

PyMODINIT_FUNC PyInit__native(void) { return PyModuleDef_Init(&definition); }
