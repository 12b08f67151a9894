# Sets KVFOLD_LLAMA_TREE to a patched llama.cpp tree, and KVFOLD_PIN_VERSION and KVFOLD_PIN_COMMIT.
#
# A tree that is already patched (it carries the stamp file `.kvfold-patched`) is used in place, so that it can be
# edited. Anything else is unpacked or copied into the build tree and patched there; see llama_source.py.
find_package(Python 3.10 COMPONENTS Interpreter REQUIRED)

file(STRINGS "${CMAKE_CURRENT_LIST_DIR}/llama-source.txt" kvfold_pin)
string(REGEX MATCH "llama-cpp-python==([^ ;]+)" _ "${kvfold_pin}")
set(KVFOLD_PIN_VERSION "${CMAKE_MATCH_1}")
string(REGEX MATCH "llama.cpp commit: ([0-9a-f]+)" _ "${kvfold_pin}")
set(KVFOLD_PIN_COMMIT "${CMAKE_MATCH_1}")

if(KVFOLD_LLAMA_CPP_DIR)
    get_filename_component(kvfold_source "${KVFOLD_LLAMA_CPP_DIR}" ABSOLUTE BASE_DIR "${CMAKE_SOURCE_DIR}")
    if(NOT EXISTS "${kvfold_source}")
        message(FATAL_ERROR "KVFOLD_LLAMA_CPP_DIR is '${KVFOLD_LLAMA_CPP_DIR}', which does not exist: give a llama.cpp tree, a llama-cpp-python source distribution, or leave it out to fetch llama-cpp-python==${KVFOLD_PIN_VERSION}.")
    endif()
endif()

if(KVFOLD_LLAMA_CPP_DIR AND EXISTS "${kvfold_source}/.kvfold-patched")
    message(STATUS "llama.cpp: ${kvfold_source}, already patched, used in place")
    set(KVFOLD_LLAMA_TREE "${kvfold_source}")
else()
    set(KVFOLD_LLAMA_TREE "${CMAKE_BINARY_DIR}/llama.cpp")
    set(kvfold_from)
    if(KVFOLD_LLAMA_CPP_DIR)
        set(kvfold_from --from "${kvfold_source}")
    endif()
    message(STATUS "llama.cpp: llama-cpp-python==${KVFOLD_PIN_VERSION} ${kvfold_from}")
    execute_process(
        COMMAND "${Python_EXECUTABLE}" "${CMAKE_CURRENT_LIST_DIR}/llama_source.py" prepare
                --out "${KVFOLD_LLAMA_TREE}" --download "${CMAKE_BINARY_DIR}/download" ${kvfold_from}
        RESULT_VARIABLE kvfold_result OUTPUT_VARIABLE kvfold_report ERROR_VARIABLE kvfold_error
        OUTPUT_STRIP_TRAILING_WHITESPACE ERROR_STRIP_TRAILING_WHITESPACE)
    if(NOT kvfold_result EQUAL 0)
        string(REGEX REPLACE "\n" " " kvfold_error "${kvfold_error}")
        message(FATAL_ERROR "llama.cpp source: ${kvfold_error}")
    endif()
    if(kvfold_report)
        message(STATUS "patches that moved:\n${kvfold_report}")
    endif()
    # Configure again when a patch changes, appears or goes.
    file(GLOB kvfold_patches CONFIGURE_DEPENDS "${CMAKE_SOURCE_DIR}/ggml_patches/*.patch")
    set_property(DIRECTORY APPEND PROPERTY CMAKE_CONFIGURE_DEPENDS
        ${kvfold_patches} "${CMAKE_CURRENT_LIST_DIR}/llama-source.txt"
        "${CMAKE_CURRENT_LIST_DIR}/llama_source.py" "${CMAKE_CURRENT_LIST_DIR}/apply_patches.py")
endif()
