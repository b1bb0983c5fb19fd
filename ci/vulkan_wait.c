// a library for LD_PRELOAD. ggml-vulkan asks again and again whether a fence is signalled, and that keeps a core busy, which a
// driver that computes on the CPU needs. with this library, such a question waits up to 10 ms for the fence.

#define _GNU_SOURCE
#include <dlfcn.h>
#include <string.h>
#include <vulkan/vulkan.h>

static VKAPI_ATTR VkResult VKAPI_CALL get_fence_status(VkDevice device, VkFence fence) {
    const VkResult res = vkWaitForFences(device, 1, &fence, VK_TRUE, 10*1000*1000);

    return res == VK_TIMEOUT ? VK_NOT_READY : res;
}

static PFN_vkVoidFunction own(const char * name) {
    return strcmp(name, "vkGetFenceStatus") == 0 ? (PFN_vkVoidFunction) get_fence_status :
        strcmp(name, "vkGetDeviceProcAddr") == 0 ? (PFN_vkVoidFunction) vkGetDeviceProcAddr : NULL;
}

VKAPI_ATTR PFN_vkVoidFunction VKAPI_CALL vkGetInstanceProcAddr(VkInstance instance, const char * name) {
    static PFN_vkGetInstanceProcAddr next;
    if (!next) {
        next = (PFN_vkGetInstanceProcAddr) dlsym(RTLD_NEXT, "vkGetInstanceProcAddr");
    }
    const PFN_vkVoidFunction res = own(name);

    return res ? res : next(instance, name);
}

VKAPI_ATTR PFN_vkVoidFunction VKAPI_CALL vkGetDeviceProcAddr(VkDevice device, const char * name) {
    static PFN_vkGetDeviceProcAddr next;
    if (!next) {
        next = (PFN_vkGetDeviceProcAddr) dlsym(RTLD_NEXT, "vkGetDeviceProcAddr");
    }
    const PFN_vkVoidFunction res = own(name);

    return res ? res : next(device, name);
}
