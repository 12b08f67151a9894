# Builds the patched llama.cpp: only the libraries and programs that are installed, with kvfold's sources compiled into
# the library each belongs to. Options given by the user (CMAKE_ARGS, -D) win over the defaults here.

function(kvfold_default name value)
    if(NOT DEFINED ${name})
        set(${name} "${value}" CACHE STRING "kvfold's default" FORCE)
    endif()
endfunction()

set(BUILD_SHARED_LIBS ON)  # the Python package loads them, and the programs share them
kvfold_default(LLAMA_BUILD_COMMON ON)
kvfold_default(LLAMA_BUILD_TOOLS ON)
kvfold_default(LLAMA_BUILD_SERVER ON)
kvfold_default(LLAMA_BUILD_TESTS OFF)
kvfold_default(LLAMA_BUILD_EXAMPLES OFF)
kvfold_default(LLAMA_BUILD_APP OFF)
# No downloads during the build and no libraries beyond the C++ runtime.
kvfold_default(LLAMA_OPENSSL OFF)
kvfold_default(LLAMA_BUILD_UI OFF)
kvfold_default(LLAMA_USE_PREBUILT_UI OFF)
kvfold_default(GGML_CUDA_NCCL OFF)
if(DEFINED LLAMA_BUILD)
    # `CMAKE_ARGS=-DLLAMA_BUILD=OFF pip install` is for llama-cpp-python, which pip installs in the same go: it must not
    # compile a second llama.cpp. It means nothing here.
    message(STATUS "LLAMA_BUILD=${LLAMA_BUILD} concerns llama-cpp-python only")
endif()

# Version information comes from the pin, never from the repository the build happens to lie in.
set(LLAMA_BUILD_NUMBER 0)
string(SUBSTRING "${KVFOLD_PIN_COMMIT}" 0 9 LLAMA_BUILD_COMMIT)
set(GIT_EXE "" CACHE INTERNAL "")

# Some compilers link the C++ runtime statically. Every library then has a copy, and would offer it to all others: in a Python
# process, where extension modules bring another version of it, tokenizers crashed in std::regex.
if(CMAKE_SYSTEM_NAME STREQUAL "Linux")
    add_link_options("LINKER:--exclude-libs,libstdc++.a")
endif()

add_subdirectory("${KVFOLD_LLAMA_TREE}" "${CMAKE_BINARY_DIR}/llama" EXCLUDE_FROM_ALL)

# --- our sources -------------------------------------------------------------------------------------------------

set(kvfold_cpp "${CMAKE_SOURCE_DIR}/cpp")
# A warning ends the build of developers and CI, not a user's: what a compiler warns of changes with its version and target.
option(KVFOLD_WERROR "Treat warnings in kvfold's own C++ as errors" OFF)
set(KVFOLD_WARNINGS -Wall -Wextra)
if(KVFOLD_WERROR)
    list(APPEND KVFOLD_WARNINGS -Werror)
endif()

# Adds sources to a target of llama.cpp's, with our warnings for these files only.
function(kvfold_add_sources target)
    if(NOT TARGET ${target} OR NOT ARGN)
        return()
    endif()
    target_sources(${target} PRIVATE ${ARGN})
    set(warnings ${KVFOLD_WARNINGS})
    foreach(file IN LISTS ARGN)
        if(file MATCHES "\\.cu$")
            set(warnings "-Xcompiler=-Wall,-Wextra")
        endif()
    endforeach()
    set_source_files_properties(${ARGN} TARGET_DIRECTORY ${target} PROPERTIES
        SKIP_UNITY_BUILD_INCLUSION ON COMPILE_OPTIONS "${warnings}")
endfunction()

file(GLOB kvfold_format CONFIGURE_DEPENDS "${kvfold_cpp}/format/*.cpp")
file(GLOB kvfold_ops CONFIGURE_DEPENDS "${kvfold_cpp}/ops/*.cpp")
file(GLOB kvfold_cuda CONFIGURE_DEPENDS "${kvfold_cpp}/ops/*.cu")
file(GLOB kvfold_cache CONFIGURE_DEPENDS "${kvfold_cpp}/cache/*.cpp")
file(GLOB kvfold_cli CONFIGURE_DEPENDS "${kvfold_cpp}/cli/*.cpp")
file(GLOB kvfold_server CONFIGURE_DEPENDS "${kvfold_cpp}/server/*.cpp")

# With GGML_CPU_ALL_VARIANTS there is one CPU library for each instruction set.
set(kvfold_cpu_targets ggml-cpu)
if(GGML_CPU_ALL_VARIANTS)
    set(kvfold_cpu_targets ${GGML_AVAILABLE_BACKENDS})
    list(FILTER kvfold_cpu_targets INCLUDE REGEX "^ggml-cpu")
endif()
foreach(target IN LISTS kvfold_cpu_targets)
    kvfold_add_sources(${target} ${kvfold_format} ${kvfold_ops})
endforeach()

# llama.cpp's kernels for AMX (Xeons since 2023) are left out: compiled by GCC 12 their first tile instruction is illegal, because
# its _tile_loadconfig loses the configuration (GCC bug 114098), models with multi-head latent attention abort in them, and
# weights packed for them take memory that `kvfold plan` does not count.
include(CheckCXXCompilerFlag)
check_cxx_compiler_flag(-mno-amx-int8 KVFOLD_KNOWS_AMX)
if(KVFOLD_KNOWS_AMX)
    foreach(target IN LISTS kvfold_cpu_targets)
        target_compile_options(${target} PRIVATE -mno-amx-tile -mno-amx-int8 -mno-amx-bf16)
    endforeach()
endif()
kvfold_add_sources(llama ${kvfold_cache})
kvfold_add_sources(llama-common ${kvfold_cli})
kvfold_add_sources(server-context ${kvfold_server})
if(GGML_CUDA)
    # Hopper's matrix instructions need an architecture of their own (90a), which llama.cpp's kernels are not compiled for.
    set(kvfold_wgmma ${kvfold_cuda})
    list(FILTER kvfold_wgmma INCLUDE REGEX "_wgmma\\.cu$")
    list(REMOVE_ITEM kvfold_cuda ${kvfold_wgmma})
    get_target_property(kvfold_archs ggml-cuda CUDA_ARCHITECTURES)
    if(kvfold_archs MATCHES "90|native|all")
        enable_language(CUDA)  # llama.cpp does so for its own directory
        add_library(kvfold-wgmma OBJECT ${kvfold_wgmma})
        set_target_properties(kvfold-wgmma PROPERTIES CUDA_ARCHITECTURES 90a-real POSITION_INDEPENDENT_CODE ON)
        target_include_directories(kvfold-wgmma PRIVATE "${kvfold_cpp}" "${kvfold_cpp}/include")
        target_compile_options(kvfold-wgmma PRIVATE -use_fast_math "-Xcompiler=-Wall,-Wextra")
        target_sources(ggml-cuda PRIVATE $<TARGET_OBJECTS:kvfold-wgmma>)
        set_property(SOURCE "${kvfold_cpp}/ops/kv_attend.cu" TARGET_DIRECTORY ggml-cuda
                     PROPERTY COMPILE_DEFINITIONS KVFOLD_WGMMA)
    endif()
    kvfold_add_sources(ggml-cuda ${kvfold_cuda})
    target_include_directories(ggml-cuda PRIVATE "${KVFOLD_LLAMA_TREE}/ggml/src/ggml-cuda")  # common.cuh
endif()

# The patched files of llama.cpp include our headers, so whole targets see them.
foreach(target IN ITEMS ggml-base ${kvfold_cpu_targets} ggml-cuda llama llama-common server-context llama-server-impl
                        llama-cli-impl llama-bench-impl llama-perplexity-impl llama-quantize-impl)
    if(TARGET ${target})
        target_include_directories(${target} PRIVATE "${kvfold_cpp}" "${kvfold_cpp}/include")
    endif()
endforeach()
foreach(target IN LISTS kvfold_cpu_targets)
    target_include_directories(${target} PRIVATE "${KVFOLD_LLAMA_TREE}/ggml/src" "${KVFOLD_LLAMA_TREE}/ggml/src/ggml-cpu")
endforeach()

# --- what is built and shipped -------------------------------------------------------------------------------------

set(KVFOLD_PROGRAMS llama-server llama-cli llama-bench llama-perplexity llama-quantize)
list(TRANSFORM KVFOLD_PROGRAMS APPEND -impl OUTPUT_VARIABLE kvfold_impl)
set(KVFOLD_LIBRARIES llama ggml ggml-base ${kvfold_cpu_targets} ggml-cuda ggml-blas ggml-hip ggml-vulkan ggml-rpc
                     llama-common mtmd ${kvfold_impl})
foreach(list IN ITEMS KVFOLD_PROGRAMS KVFOLD_LIBRARIES)
    set(present)
    foreach(target IN LISTS ${list})
        if(TARGET ${target})
            list(APPEND present ${target})
        endif()
    endforeach()
    set(${list} ${present})
endforeach()
# One plain file for each library: wheels cannot hold the symbolic links of versioned names, llama_cpp asks for
# `libllama.so`, and a name without a version never mixes with a llama.cpp installed elsewhere.
foreach(target IN LISTS KVFOLD_LIBRARIES)
    set_property(TARGET ${target} PROPERTY VERSION)
    set_property(TARGET ${target} PROPERTY SOVERSION)
endforeach()
add_custom_target(kvfold-runtime ALL DEPENDS ${KVFOLD_LIBRARIES} ${KVFOLD_PROGRAMS})
