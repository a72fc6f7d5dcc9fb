// The contents of the records and answers that are written by hand on both sides; those of the other calls
// are generated. Plain data, with addresses that mean the same in both processes: device memory, and pinned
// memory.
#pragma once
#include <array>
#include <cstddef>
#include <cstdint>

#include "proxy_calls.h"

namespace jitckpt::proxy::wire {

// How the server is asked to start: the numbers of the files that it inherits.
constexpr int socket_file = 3, log_file = 4, pinned_file = 5;

// The server's first words over the socket. Then the client asks for ids, as many as it says, and is sent
// them one by one; `begin` makes the server read the log. `reset` makes it stop that and drop all that it has
// made, but the memory, whose content counts for nothing; if it can, it says `reset` and is where it was
// after the greeting, else it ends. Before `begin` it can be told to load a library, which it will need.
// `rest` makes it stop, too, but not drop anything: it says Rested, and can then be told to `finish` the
// optimizer step that it is ready for, to `copy_state` to the host, and at last to `reset`, or to
// `reset_but_memory`, after which the state is still there. It says the same word when that is done, 0 if it
// can't. `settle` stops nothing: once the device has nothing to do it says Rested with that word, or, if it
// is told something else before, nothing; then it can be told to `copy_state`, too. The client has no call in
// the log that is not read, and writes none meanwhile.
struct ServerGreeting {
  uint64_t table_hash;
  int32_t ready;  // 0: `text` says why not
  char text[500];
};

constexpr uint32_t begin = ~uint32_t{0}, reset = begin - 1, load = begin - 2, rest = begin - 3,
                   finish = begin - 4, copy_state = begin - 5, settle = begin - 6,
                   reset_but_memory = begin - 7;
struct Load {
  uint32_t word;  // load
  char path[4096];
};
// finish: `first` is the step. copy_state: Range[second], which the client has put into pinned memory at
// `first`.
struct ServerOrder {
  uint32_t word;
  uint64_t first, second;
};
// intact: the device's memory holds the parameters and the optimizer state after step `ended`. suspect: no
// more than that can be said of it, so they may be copied, and nothing else be done. changed: calls since
// then may have written to them, so they do for the next step alone.
struct Rested {
  uint32_t word;  // rest, or settle
  uint32_t intact, suspect, changed;
  uint64_t ended;
};

// 0, cudaStreamLegacy and cudaStreamPerThread stand for themselves.
constexpr uint64_t named_streams = 3;

// Followed by attribute_count cudaLaunchAttribute, then parameter_bytes of parameters.
struct launch {
  uint64_t kernel, stream, shared_bytes;
  uint32_t grid[3], block[3];
  uint32_t attribute_count, parameter_bytes;
};

// address: 0, or where the memory has to be. The client puts it into the record when it has the answer, so
// that the call gives the same when it is made again.
struct allocate {
  uint64_t address, bytes;
};
struct allocate_answer {
  uint64_t address;
};

// flag: which of ControlBlock::copied says that it is over, and need not be made again. The first
// compared_bytes of what it has copied are put to `kept` as well, and what a replay would have copied is put
// behind them and compared: 0: nothing is. room: as below.
struct copy {
  uint64_t to, from, bytes, stream;
  int32_t kind;
  uint32_t flag;
  uint64_t kept, room, compared_bytes;
};

// Followed by the bytes.
struct copy_from_host {
  uint64_t to, bytes, stream;
};

// From pinned memory, which is read when the stream comes to it. What it has read is put to `kept`, which
// lies in a room of ControlBlock::segment_bytes of pinned memory that the program does not see; the flag, as
// of a copy, says that it is there, for when the call is made again.
struct copy_from_pinned {
  uint64_t to, from, bytes, stream, kept, room;
  uint32_t flag;
};

// Rows of the same bytes; flag: as of a copy, where it is pinned memory.
struct fill {
  uint64_t to, pitch, width, height, stream;
  int32_t value;
  uint32_t flag;
};

// The answer is in the slot's staging memory. digest: of what it was, which the client puts into the record
// when it has it; 0: not known. In a replay it has to be the same.
struct copy_to_host {
  uint64_t digest, from, bytes, stream;
};

// The device's memory is to be copied to the host once all calls before are over, unless that has been done.
// Images are numbered from 1. Followed by Range[ranges]; their copies lie in host memory at `copies`, of
// `room` bytes.
struct keep_image {
  uint64_t image, ranges, copies, room;
};
struct Range {
  uint64_t from, to, bytes;
  int32_t device;
};
// The optimizer step after which the state has this number, by the thread of this slot. The device makes no
// call behind it before the image of this number is whole, and all ranks are ready for their steps. In a
// replay that begins with the state, the thread's calls up to end_step are not made, as far as they write to
// the device. Followed by Range[ranges], the image.
struct begin_step {
  uint64_t step, ranges, copies, room;
  uint32_t slot;
};
// Followed by Place[places]: the parameters and the optimizer state.
struct end_step {
  uint64_t step, places;
};
struct Place {
  uint64_t address, bytes;
};
// A replay begins with that state, whose parameters and optimizer state are on the device (in_place: 1), or
// in that part of a file of a process, one place after the other; or the image has them (places: 0). Followed
// by Place[places].
struct restore_state {
  uint64_t state, places, offset, bytes;
  int32_t in_place, process, file;
};
// How a block compares. unwritten: it differs where it was overwritten or filled before the minibatch was run
// again, and the minibatch never writes; or the minibatch has made the memory.
enum class Found : uint8_t { same, unwritten, different };
// Before a call that may write to the state where it stays on the device: once all calls before are over it
// is copied to the host, unless that has been done; from then on the device does not hold it. Nothing that
// writes is made behind it where it can't be copied. Followed by Range[ranges].
struct save_state {
  uint64_t state, ranges;
};
// Whether it is still as that copy. Followed by Range[ranges].
struct compare_state {
  uint64_t ranges;
};
struct compare_state_answer {
  uint32_t known, same;
};
// The same of a part of it, behind such a call; the answer is written to a byte of pinned memory, as a Found.
struct look_at_state {
  uint64_t ranges, found;
};
struct newest_image {};
struct newest_image_answer {
  uint64_t image;
};

// The time is to be noted in ControlBlock::made_at.
struct note_time {
  uint32_t made;  // Made
};
// The program has been told that the event, or what is on the stream, is over: what it does next may rely on
// it, though no call says so. So when the calls are made again, it has to be over here.
struct was_over {
  uint64_t event, stream;  // event: 0: the stream
};
// Once all calls before are over, the device's memory is copied to the host. When the call is made again it
// is compared with that copy, and what differs becomes again what it was. Checks are numbered from 1.
// Followed by Piece[pieces].
struct check_memory {
  uint64_t check, pieces;
};
// found: a Found for each block of the piece. image: what it was when the minibatch began; 0: it held
// nothing.
struct Piece {
  uint64_t address, image, copy, found, bytes;
  int32_t device;
  uint32_t filled;  // 1: it was free then, so all of it is ControlBlock::filled_with before the calls are
                    // made again
};
struct check_memory_answer {
  uint64_t check;  // the newest whose copy is whole
};
constexpr std::size_t block_bytes = 512;  // torch's allocator gives no less
constexpr uint8_t overwritten = 0x5a;     // what a validation fills memory with that is not put back

// Followed by calls: GroupedCall and content each, both aligned as records are. The server makes them between
// ncclGroupStart and ncclGroupEnd.
struct collective_group {
  uint32_t calls;
};
struct alignas(16) GroupedCall {
  uint16_t call;
  uint32_t bytes;  // of the content, without padding
};

// Followed by the path of the library. `offset` is that of the kernel's host stub in it, `kernel` the number
// that the client gives to it.
struct find_kernel {
  uint64_t kernel, offset, path_bytes;
};
struct Parameter {
  uint32_t offset, bytes;
};
constexpr std::size_t most_parameters = 512;
struct find_kernel_answer {
  uint32_t parameter_count, parameter_bytes;
  Parameter parameters[most_parameters];
};

// Followed by the path of cuBLAS, where the program has loaded it.
struct make_blas {
  uint64_t handle, path_bytes;
};

constexpr std::size_t most_heuristics = 16;
// layouts: of A, B, C and D.
struct matmul_heuristic {
  uint64_t handle, description, layouts[4], preference;
  int32_t requested;
};
struct matmul_heuristic_answer {
  int32_t found;
  cublasLtMatmulHeuristicResult_t results[most_heuristics];
};

struct register_host {
  uint64_t address, bytes;
  uint32_t flags;
};
struct unregister_host {
  uint64_t address;
};
// Pinned memory that is part of a file of the program's, which it has open in this process under this number.
struct share_host {
  uint64_t address, bytes, offset;
  int32_t process, file;
};
// The device writes the word once all before it on the stream is over: the value, or 0 if what is before it
// may count for nothing.
struct write_word {
  uint64_t address, value, stream;
};

// NCCL's configuration with its texts.
struct Configuration {
  ncclConfig_t values;
  int32_t given, has_communicator_name, has_network_name;
  char communicator_name[256], network_name[64];
};
struct init_communicator {
  uint64_t communicator;
  int32_t ranks, rank;
  ncclUniqueId id;
  Configuration configuration;
};
// For the agent's ids: from now on the communicator of this key is made from another id than the program
// says.
struct renew_id {
  std::array<uint8_t, 16> key;
  ncclUniqueId id;
};
struct make_id {};
struct make_id_answer {
  ncclUniqueId id;
};
struct split_communicator {
  uint64_t parent, communicator;  // 0: the caller wants none
  int32_t color, key;
  Configuration configuration;
};
struct split_communicator_answer {
  int32_t rank, size;
};
struct make_reduction {
  uint64_t communicator, reduction, device_scalar;
  unsigned char host_scalar[8];
  ncclDataType_t type;
  ncclScalarResidence_t residence;
};
// Of memory with a communicator, which then sends from there without a copy.
struct register_buffer {
  uint64_t communicator, registration, address, bytes;
};
struct deregister_buffer {
  uint64_t communicator, registration;
};

struct device_count {};
struct device_count_answer {
  int32_t count;
};

struct pci_bus_id {
  int32_t device;
};
struct pci_bus_id_answer {
  char text[64];
};

// The name and the description of an error, as the library gives them.
struct error_text {
  int32_t error, nccl;
};
struct error_text_answer {
  char name[128], text[256];
};

}  // namespace jitckpt::proxy::wire
