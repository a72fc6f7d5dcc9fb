// Faults on order from inside the process: what tests and jitckpt's `--fault` call. docs/reference/faults.md
// describes the text. Plain C, so that any language can call it.
#ifndef SOFTGPU_FAULT_H
#define SOFTGPU_FAULT_H
#include <stddef.h>
#ifdef __cplusplus
extern "C" {
#endif

// Arms the fault that the text describes, such as "kind=sticky call=3". Returns 0, or -1 if there is no such
// fault. answer (of `capacity` bytes; may be null with 0) gets a sentence: what will happen, or what is
// wrong.
int softgpu_fault(const char* text, char* answer, size_t capacity);

#ifdef __cplusplus
}
#endif
#endif
