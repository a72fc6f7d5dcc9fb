// How communicators are made: by unique id, or out of another one. All of these end in join().
#pragma once
#include <nccl.h>

#include <vector>

namespace softgpu::nccl {

// The functions of the same names in nccl.h. They throw a NcclFailure, or return ncclSuccess or
// ncclInProgress.
ncclResult_t init_rank(ncclComm_t* made, int ranks, const std::vector<ncclUniqueId>& ids, int rank,
                       const ncclConfig_t* config);
ncclResult_t init_all(ncclComm_t* made, int devices, const int* device_list);
ncclResult_t split(ncclComm_t parent, int color, int key, ncclComm_t* made, const ncclConfig_t* config);
ncclResult_t shrink(ncclComm_t parent, const std::vector<int>& excluded, ncclComm_t* made,
                    const ncclConfig_t* config, int flags);

}  // namespace softgpu::nccl
