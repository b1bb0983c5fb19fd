# The parts of llama-server that upstream does not have. CMakeLists.txt includes this file

target_sources(server-context PRIVATE
    server-batch-view.cpp
    server-budget.cpp
    server-bytes.cpp
    server-component.cpp
    server-conversation-disk.cpp
    server-conversation-files.cpp
    server-conversation.cpp
    server-conversations.cpp
    server-draft.cpp
    server-draft-catch-up.cpp
    server-gguf.cpp
    server-idle.cpp
    server-main-loop.cpp
    server-memory.cpp
    server-memory-policy.cpp
    server-memory-slots.cpp
    server-memory-stats.cpp
    server-oom.cpp
    server-parts.cpp
    server-pause.cpp
    server-pool.cpp
    server-pool-capacity.cpp
    server-projector.cpp
    server-projector-ref.cpp
    server-provenance.cpp
    server-refusal.cpp
    server-replies.cpp
    server-requantize.cpp
    server-share.cpp
    server-slot.cpp
    server-slot-cells.cpp
    ../kv-check/resident.cpp)

target_link_libraries(server-context PRIVATE vendor::hash)

if (WIN32)
    target_link_libraries(server-context PUBLIC psapi)
endif()
