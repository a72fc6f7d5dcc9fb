// What libjitckpt_proxy.so offers beside CUDA's and NCCL's symbols. Plain C, so that any language can call
// it.
#ifndef JITCKPT_PROXY_H
#define JITCKPT_PROXY_H
#ifdef __cplusplus
extern "C" {
#endif

#define JITCKPT_PROXY_CALL __attribute__((visibility("default")))

// A minibatch begins: from here on a server that dies is replaced by a new one, which gets the device's
// memory as it is now and then makes all calls since. The server copies all memory of the devices to the host
// (an image) when it has come so far; this call only waits for the last call's image. What the calls before
// this one have kept stays until then. No other thread may put work on the device meanwhile. Does nothing if
// there are other ranks and this one has said nothing to any since the last call. Returns 0, or the CUDA
// error of the thread, with its text for cudaGetErrorString.
JITCKPT_PROXY_CALL int jitckpt_proxy_keep(void);

// The process id of the server; 0: there is none (yet, or any more). While all ranks recover it waits for the
// new one.
JITCKPT_PROXY_CALL int jitckpt_proxy_server(void);

#ifdef __cplusplus
}
#endif
#endif
