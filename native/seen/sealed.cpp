#include "seen/sealed.h"

#define XXH_INLINE_ALL
#include <xxhash.h>

#include <cstdint>
#include <cstring>

namespace jitckpt::seen {

namespace {

// format.BLOB_HEADER; the checksum is of all that follows it.
struct Head {
  XXH128_canonical_t checksum;
  uint64_t sequence, step, length;
};
static_assert(sizeof(Head) == 40, "as format.BLOB_HEADER has it");

void seal(char* bytes, size_t size, uint64_t sequence, uint64_t step) {
  Head head{{}, sequence, step, size - sizeof(Head)};
  std::memcpy(bytes, &head, sizeof head);
  const XXH128_hash_t checksum = XXH3_128bits(bytes + sizeof head.checksum, size - sizeof head.checksum);
  XXH128_canonicalFromHash(&head.checksum, checksum);
  std::memcpy(bytes, &head.checksum, sizeof head.checksum);
}

}  // namespace

PyObject* write_sealed(PyObject*, PyObject* args) {
  Py_buffer memory, blob;
  Py_ssize_t start = 0;
  unsigned long long sequence = 0, step = 0;
  if (PyArg_ParseTuple(args, "w*nw*KK:write_sealed", &memory, &start, &blob, &sequence, &step) == 0)
    return nullptr;
  const bool fits =
      blob.len >= static_cast<Py_ssize_t>(sizeof(Head)) && start >= 0 && start <= memory.len - blob.len;
  if (fits) {
    seal(static_cast<char*>(blob.buf), static_cast<size_t>(blob.len), sequence, step);
    std::memcpy(static_cast<char*>(memory.buf) + start, blob.buf, static_cast<size_t>(blob.len));
  } else {
    PyErr_Format(PyExc_ValueError, "%zd bytes at %zd have no place in %zd, or no head", blob.len, start,
                 memory.len);
  }
  PyBuffer_Release(&blob);
  PyBuffer_Release(&memory);
  return fits ? Py_NewRef(Py_None) : nullptr;
}

}  // namespace jitckpt::seen
