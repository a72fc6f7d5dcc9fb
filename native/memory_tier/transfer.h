// A shard's chunks from one host's memory into another's, over a connection that both agents have agreed on.
//
// The sender says of each chunk its number and size, and sends it; the receiver answers with the number and
// whether its checksum is right. So many chunks may be unanswered at a time. Both know number, sizes and
// checksums before (from the shard's index): what is not so ends it. After a wrong one the sender says that
// it gives up, looks whether it is wrong there, too, and the connection can be talked on.
#pragma once

#include <functional>
#include <span>

#include "memory_tier/chunk_connection.h"
#include "memory_tier/digests.h"
#include "memory_tier/pace.h"
#include "memory_tier/window.h"

namespace jitckpt::memory_tier {

constexpr uint64_t most_unanswered = 4;  // chunks: GEMINI's p sub-buffers

// Each throws ChunkFailure.
void send_chunks(ChunkConnection& connection, const Window& from, std::span<const Digest> digests,
                 Pace& pace);
void receive_chunks(ChunkConnection& connection, const Window& to, std::span<const Digest> digests);

// Receives what is so long and cut into such chunks; each is handed on once it is known to be right.
using Taker = std::function<void(uint64_t number, std::span<const std::byte> chunk)>;
void receive_each(ChunkConnection& connection, uint64_t size, uint64_t chunk, std::span<const Digest> digests,
                  const Taker& take);

}  // namespace jitckpt::memory_tier
