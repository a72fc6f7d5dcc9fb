#include "memory_tier/digests.h"

namespace jitckpt::memory_tier {

extern const DigestCalls digest_calls, digest_calls_avx2;  // chunk_digest.cpp

namespace {

const DigestCalls& fastest() {
#if defined(__x86_64__)
  return __builtin_cpu_supports("avx2") ? digest_calls_avx2 : digest_calls;
#else
  return digest_calls;
#endif
}

}  // namespace

Digest digest_of(std::span<const std::byte> data) {
  static const DigestCalls& calls = fastest();
  Digest digest;
  calls.at_once(data.data(), data.size(), digest.data());
  return digest;
}

Digester::Digester() : calls_(fastest()), state_(calls_.create(), calls_.free) { calls_.reset(state_.get()); }

Digest Digester::finish() {
  Digest digest;
  calls_.finish(state_.get(), digest.data());
  calls_.reset(state_.get());
  return digest;
}

}  // namespace jitckpt::memory_tier
