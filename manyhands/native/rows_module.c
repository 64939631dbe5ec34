/* rows.h for Python, as module.c is for core.h: addresses and lengths are plain integers, a rule is the bytes of its
 * struct, and the caller keeps memory alive and lengths right. */
#define Py_LIMITED_API 0x030B0000
#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include "rows.h"

#define AT(kind, address) ((kind *)(uintptr_t)(address))

typedef unsigned long long number;

struct rule {
    const char *bytes;
    Py_ssize_t length;
};

static const struct mh_rows_rule *as_rule(const struct rule *given) {
    const struct mh_rows_rule *rule = (const struct mh_rows_rule *)given->bytes;
    if (given->length == sizeof *rule && rule->optimizer >= 0 && rule->optimizer < MH_NUM_ROW_RULES && rule->start >= 0 &&
        rule->start < MH_NUM_ROW_STARTS) {
        return rule;
    }
    PyErr_SetString(PyExc_ValueError, "a rule is the bytes of a struct mh_rows_rule");
    return NULL;
}

static PyObject *room_tuple(const struct mh_rows_room *room) {
    return Py_BuildValue("IIKKK", room->dim, room->num_states, (number)room->rows, (number)room->candidates,
                         (number)room->touched);
}

static int to_room(PyObject *tuple, void *room) {
    struct mh_rows_room *to = room;
    number rows, candidates, touched;
    if (!PyArg_ParseTuple(tuple, "IIKKK:room", &to->dim, &to->num_states, &rows, &candidates, &touched)) return 0;
    to->rows = rows, to->candidates = candidates, to->touched = touched;
    return 1;
}

static PyObject *rows_bytes(PyObject *self, PyObject *args) {
    struct mh_rows_room room;
    if (!PyArg_ParseTuple(args, "O&:rows_bytes", to_room, &room)) return NULL;
    return PyLong_FromSize_t(mh_rows_bytes(&room));
}

static PyObject *rows_format(PyObject *self, PyObject *args) {
    number memory;
    struct mh_rows_room room;
    if (!PyArg_ParseTuple(args, "KO&:rows_format", &memory, to_room, &room)) return NULL;
    mh_rows_format(AT(void, memory), &room);
    Py_RETURN_NONE;
}

static PyObject *rows_room(PyObject *self, PyObject *args) {
    number memory;
    Py_ssize_t bytes;
    struct mh_rows_room room;
    if (!PyArg_ParseTuple(args, "Kn:rows_room", &memory, &bytes)) return NULL;
    if (mh_rows_read_room(AT(const void, memory), (size_t)bytes, &room)) Py_RETURN_NONE;
    return room_tuple(&room);
}

static PyObject *rows_count(PyObject *self, PyObject *args) {
    number memory;
    struct mh_rows_count count;
    if (!PyArg_ParseTuple(args, "K:rows_count", &memory)) return NULL;
    mh_rows_count(AT(const void, memory), &count);
    return Py_BuildValue("KKK", (number)count.number, (number)count.rows, (number)count.candidates);
}

static PyObject *rows_recover(PyObject *self, PyObject *args) {
    number memory;
    if (!PyArg_ParseTuple(args, "K:rows_recover", &memory)) return NULL;
    return PyBool_FromLong(mh_rows_recover(AT(void, memory)));
}

static PyObject *rows_lookup(PyObject *self, PyObject *args) {
    struct rule given;
    number memory, ids, to, at_most;
    Py_ssize_t count;
    int failed;
    if (!PyArg_ParseTuple(args, "Ky#KnKK:rows_lookup", &memory, &given.bytes, &given.length, &ids, &count, &to, &at_most)) {
        return NULL;
    }
    const struct mh_rows_rule *rule = as_rule(&given);
    if (rule == NULL) return NULL;
    Py_BEGIN_ALLOW_THREADS
    failed = mh_rows_lookup(AT(const void, memory), rule, AT(const int64_t, ids), (size_t)count, AT(float, to), at_most);
    Py_END_ALLOW_THREADS
    if (failed) return PyErr_NoMemory();
    Py_RETURN_NONE;
}

static PyObject *rows_peek(PyObject *self, PyObject *args) {
    struct rule given;
    struct mh_rows_room room;
    number memory, ids, to, places, at_most;
    Py_ssize_t count;
    int failed;
    if (!PyArg_ParseTuple(args, "KO&y#KnKKK:rows_peek", &memory, to_room, &room, &given.bytes, &given.length, &ids, &count,
                          &to, &places, &at_most)) {
        return NULL;
    }
    const struct mh_rows_rule *rule = as_rule(&given);
    if (rule == NULL) return NULL;
    Py_BEGIN_ALLOW_THREADS
    failed = mh_rows_peek(AT(const void, memory), &room, rule, AT(const int64_t, ids), (size_t)count, AT(float, to),
                          AT(const int64_t, places), at_most);
    Py_END_ALLOW_THREADS
    return PyLong_FromLong(failed);
}

static PyObject *rows_update(PyObject *self, PyObject *args) {
    struct rule given;
    number memory, update, ids, gradients;
    Py_ssize_t count;
    float factor;
    int may_evict, failed;
    struct mh_rows_room wanted;
    if (!PyArg_ParseTuple(args, "Ky#KKKnfp:rows_update", &memory, &given.bytes, &given.length, &update, &ids, &gradients,
                          &count, &factor, &may_evict)) {
        return NULL;
    }
    const struct mh_rows_rule *rule = as_rule(&given);
    if (rule == NULL) return NULL;
    Py_BEGIN_ALLOW_THREADS
    failed = mh_rows_update(AT(void, memory), rule, update, AT(const int64_t, ids), AT(const float, gradients),
                            (size_t)count, factor, may_evict, &wanted);
    Py_END_ALLOW_THREADS
    return Py_BuildValue("iN", failed, room_tuple(&wanted));
}

static PyObject *rows_move(PyObject *self, PyObject *args) {
    number from, to;
    if (!PyArg_ParseTuple(args, "KK:rows_move", &from, &to)) return NULL;
    Py_BEGIN_ALLOW_THREADS
    mh_rows_move(AT(const void, from), AT(void, to));
    Py_END_ALLOW_THREADS
    Py_RETURN_NONE;
}

static PyObject *rows_list(PyObject *self, PyObject *args) {
    number memory, ids, places, updates;
    if (!PyArg_ParseTuple(args, "KKKK:rows_list", &memory, &ids, &places, &updates)) return NULL;
    Py_BEGIN_ALLOW_THREADS
    mh_rows_list(AT(const void, memory), AT(int64_t, ids), AT(uint32_t, places), AT(uint32_t, updates));
    Py_END_ALLOW_THREADS
    Py_RETURN_NONE;
}

static PyObject *rows_fill(PyObject *self, PyObject *args) {
    number memory, update, ids, places, updates;
    Py_ssize_t count;
    if (!PyArg_ParseTuple(args, "KKKKKn:rows_fill", &memory, &update, &ids, &places, &updates, &count)) return NULL;
    Py_BEGIN_ALLOW_THREADS
    mh_rows_fill(AT(void, memory), update, AT(const int64_t, ids), AT(const uint32_t, places), AT(const uint32_t, updates),
                 (size_t)count);
    Py_END_ALLOW_THREADS
    Py_RETURN_NONE;
}

static PyObject *rows_digest(PyObject *self, PyObject *args) {
    number memory, turn, turns;
    uint64_t found;
    if (!PyArg_ParseTuple(args, "KKK:rows_digest", &memory, &turn, &turns)) return NULL;
    Py_BEGIN_ALLOW_THREADS
    found = mh_rows_digest(AT(const void, memory), turn, turns);
    Py_END_ALLOW_THREADS
    return PyLong_FromUnsignedLongLong(found);
}

static PyObject *rows_offset(PyObject *self, PyObject *args) {
    number memory;
    if (!PyArg_ParseTuple(args, "K:rows_offset", &memory)) return NULL;
    return PyLong_FromSize_t(mh_rows_offset(AT(const void, memory)));
}

static PyObject *rows_stride(PyObject *self, PyObject *args) {
    unsigned int dim, num_states;
    if (!PyArg_ParseTuple(args, "II:rows_stride", &dim, &num_states)) return NULL;
    return PyLong_FromSize_t(mh_rows_stride(dim, num_states));
}

static PyObject *row_states(PyObject *self, PyObject *args) {
    int optimizer;
    unsigned int dim;
    if (!PyArg_ParseTuple(args, "iI:row_states", &optimizer, &dim)) return NULL;
    return PyLong_FromUnsignedLong(mh_row_states(optimizer, dim));
}

static PyObject *unique(PyObject *self, PyObject *args) {
    number ids, different, inverse;
    Py_ssize_t count;
    int64_t found;
    if (!PyArg_ParseTuple(args, "KnKK:unique", &ids, &count, &different, &inverse)) return NULL;
    Py_BEGIN_ALLOW_THREADS
    found = mh_unique(AT(const int64_t, ids), (size_t)count, AT(int64_t, different), AT(int64_t, inverse));
    Py_END_ALLOW_THREADS
    return found < 0 ? PyErr_NoMemory() : PyLong_FromLongLong(found);
}

static PyObject *part_bounds(PyObject *self, PyObject *args) {
    number ids;
    Py_ssize_t count;
    int64_t bounds[MH_ROW_PARTS + 1];
    int in_order;
    if (!PyArg_ParseTuple(args, "Kn:part_bounds", &ids, &count)) return NULL;
    Py_BEGIN_ALLOW_THREADS
    in_order = mh_part_bounds(AT(const int64_t, ids), (size_t)count, bounds);
    Py_END_ALLOW_THREADS
    PyObject *list = PyList_New(MH_ROW_PARTS + 1);
    for (Py_ssize_t i = 0; list != NULL && i <= MH_ROW_PARTS; i++) {
        PyObject *bound = PyLong_FromLongLong(bounds[i]);
        if (bound == NULL || PyList_SetItem(list, i, bound)) Py_CLEAR(list);
    }
    return list == NULL ? NULL : Py_BuildValue("NN", PyBool_FromLong(in_order), list);
}

static PyObject *first_places(PyObject *self, PyObject *args) {
    number inverse, first;
    Py_ssize_t count;
    if (!PyArg_ParseTuple(args, "KnK:first_places", &inverse, &count, &first)) return NULL;
    Py_BEGIN_ALLOW_THREADS
    mh_first_places(AT(const int64_t, inverse), (size_t)count, AT(int64_t, first));
    Py_END_ALLOW_THREADS
    Py_RETURN_NONE;
}

static PyObject *repeat_rows(PyObject *self, PyObject *args) {
    number rows, inverse, first;
    Py_ssize_t count, dim;
    if (!PyArg_ParseTuple(args, "KKKnn:repeat_rows", &rows, &inverse, &first, &count, &dim)) return NULL;
    Py_BEGIN_ALLOW_THREADS
    mh_repeat_rows(AT(float, rows), AT(const int64_t, inverse), AT(const int64_t, first), (size_t)count, (size_t)dim);
    Py_END_ALLOW_THREADS
    Py_RETURN_NONE;
}

static PyObject *add_rows(PyObject *self, PyObject *args) {
    number to, values, inverse;
    Py_ssize_t count, dim;
    if (!PyArg_ParseTuple(args, "KKKnn:add_rows", &to, &values, &inverse, &count, &dim)) return NULL;
    Py_BEGIN_ALLOW_THREADS
    mh_add_rows(AT(float, to), AT(const float, values), AT(const int64_t, inverse), (size_t)count, (size_t)dim);
    Py_END_ALLOW_THREADS
    Py_RETURN_NONE;
}

PyMethodDef mh_row_methods[] = {
    {"rows_bytes", rows_bytes, METH_VARARGS, "rows_bytes(room): how much memory a table takes"},
    {"rows_format", rows_format, METH_VARARGS, "rows_format(address, room): make an empty table of zeroed memory"},
    {"rows_room", rows_room, METH_VARARGS, "rows_room(address, bytes): the table's capacities, or None"},
    {"rows_count", rows_count, METH_VARARGS, "rows_count(address): last update, rows and candidates"},
    {"rows_recover", rows_recover, METH_VARARGS, "rows_recover(address): undo an update that was not finished"},
    {"rows_lookup", rows_lookup, METH_VARARGS, "rows_lookup(address, rule, ids, count, to, at_most)"},
    {"rows_peek", rows_peek, METH_VARARGS,
     "rows_peek(address, room, rule, ids, count, to, places, at_most): 0, ROWS_CHANGING or ROWS_GONE; while others change rows"},
    {"rows_update", rows_update, METH_VARARGS,
     "rows_update(address, rule, number, ids, gradients, count, factor, may_evict): what failed, and room wanted"},
    {"rows_move", rows_move, METH_VARARGS, "rows_move(from, to): copy a table into an empty one"},
    {"rows_list", rows_list, METH_VARARGS, "rows_list(address, ids, places, updates)"},
    {"rows_fill", rows_fill, METH_VARARGS, "rows_fill(address, number, ids, places, updates, count)"},
    {"rows_digest", rows_digest, METH_VARARGS, "rows_digest(address, turn, turns): of one in `turns` ids"},
    {"rows_offset", rows_offset, METH_VARARGS, "rows_offset(address): offset of the first row in bytes"},
    {"rows_stride", rows_stride, METH_VARARGS, "rows_stride(dim, num_states): distance between rows in floats"},
    {"row_states", row_states, METH_VARARGS, "row_states(optimizer, dim): numbers of optimizer state per row"},
    {"unique", unique, METH_VARARGS, "unique(ids, count, different, inverse): the number of unique ids"},
    {"part_bounds", part_bounds, METH_VARARGS, "part_bounds(ids, count): whether they are in order, and where parts begin"},
    {"first_places", first_places, METH_VARARGS, "first_places(inverse, count, first): the first index of each unique id"},
    {"repeat_rows", repeat_rows, METH_VARARGS, "repeat_rows(rows, inverse, first, count, dim)"},
    {"add_rows", add_rows, METH_VARARGS, "add_rows(to, values, inverse, count, dim)"},
    {NULL, NULL, 0, NULL},
};
