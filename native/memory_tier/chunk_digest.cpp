// xxhash, compiled once for every processor and once with AVX2, which is twice as fast.
#define XXH_INLINE_ALL
#define XXH_FORCE_MEMORY_ACCESS 0  // by memcpy: what is not aligned is read without undefined behaviour
#include <xxhash.h>

#include <new>

#include "memory_tier/digests.h"

namespace jitckpt::memory_tier {
namespace {

void* create() {
  XXH3_state_t* const state = XXH3_createState();
  if (!state) throw std::bad_alloc();
  return state;
}
void free_state(void* state) { XXH3_freeState(static_cast<XXH3_state_t*>(state)); }
void reset(void* state) { XXH3_128bits_reset(static_cast<XXH3_state_t*>(state)); }
void add(void* state, const void* data, size_t size) {
  XXH3_128bits_update(static_cast<XXH3_state_t*>(state), data, size);
}
void finish(const void* state, uint8_t* digest) {
  XXH128_canonicalFromHash(reinterpret_cast<XXH128_canonical_t*>(digest),
                           XXH3_128bits_digest(static_cast<const XXH3_state_t*>(state)));
}
void at_once(const void* data, size_t size, uint8_t* digest) {
  XXH128_canonicalFromHash(reinterpret_cast<XXH128_canonical_t*>(digest), XXH3_128bits(data, size));
}

}  // namespace

#ifdef WITH_AVX2
extern const DigestCalls digest_calls_avx2;
const DigestCalls digest_calls_avx2{create, free_state, reset, add, finish, at_once};
#else
extern const DigestCalls digest_calls;
const DigestCalls digest_calls{create, free_state, reset, add, finish, at_once};
#endif

}  // namespace jitckpt::memory_tier
