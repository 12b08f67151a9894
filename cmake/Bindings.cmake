# The Python extension module kvfold._core: cpp/bindings/module.cpp and one register_TOPIC.cpp for each topic.
find_package(Python 3.10 COMPONENTS Interpreter Development.Module REQUIRED)
find_package(pybind11 3 CONFIG QUIET)
if(NOT pybind11_FOUND)
    execute_process(COMMAND "${Python_EXECUTABLE}" -m pybind11 --cmakedir OUTPUT_VARIABLE kvfold_pybind11_dir
                    OUTPUT_STRIP_TRAILING_WHITESPACE ERROR_QUIET)
    find_package(pybind11 3 CONFIG QUIET PATHS "${kvfold_pybind11_dir}")
    if(NOT pybind11_FOUND)
        message(FATAL_ERROR "pybind11 3 or newer was not found for ${Python_EXECUTABLE}: run `pip install 'pybind11>=3'`, or build without the Python module with -DKVFOLD_BINDINGS=OFF.")
    endif()
endif()

file(GLOB kvfold_register CONFIGURE_DEPENDS "${kvfold_cpp}/bindings/register_*.cpp")
pybind11_add_module(_core MODULE NO_EXTRAS "${kvfold_cpp}/bindings/module.cpp" ${kvfold_register})
# llama.cpp's source directory: its memory report is in a header that it does not install.
target_include_directories(_core PRIVATE "${kvfold_cpp}" "${kvfold_cpp}/include" "$<TARGET_PROPERTY:llama,SOURCE_DIR>")
target_compile_options(_core PRIVATE ${KVFOLD_WARNINGS})
target_link_libraries(_core PRIVATE llama)
if(GGML_BACKEND_DL)
    # The CPU libraries are plug-ins there and cannot be linked, so the operations are compiled in as well.
    set(kvfold_plain_ops ${kvfold_ops})
    list(FILTER kvfold_plain_ops EXCLUDE REGEX "backend")
    target_sources(_core PRIVATE ${kvfold_format} ${kvfold_plain_ops})
else()
    target_link_libraries(_core PRIVATE ggml-cpu)
endif()
set_target_properties(_core PROPERTIES LIBRARY_OUTPUT_DIRECTORY "${CMAKE_BINARY_DIR}/kvfold")

# module.cpp calls register_TOPIC for the topics that exist.
foreach(file IN LISTS kvfold_register)
    get_filename_component(topic "${file}" NAME_WE)
    string(TOUPPER "KVFOLD_HAVE_${topic}" define)
    set_property(SOURCE "${kvfold_cpp}/bindings/module.cpp" APPEND PROPERTY COMPILE_DEFINITIONS ${define})
endforeach()

set(kvfold_backends "cpu")
foreach(backend IN ITEMS CUDA HIP VULKAN BLAS RPC)
    if(GGML_${backend})
        string(TOLOWER ${backend} backend)
        string(APPEND kvfold_backends " ${backend}")
    endif()
endforeach()
string(TOUPPER "CMAKE_CXX_FLAGS_${CMAKE_BUILD_TYPE}" kvfold_flags)
string(STRIP "${CMAKE_CXX_FLAGS} ${${kvfold_flags}}" kvfold_flags)
if(GGML_NATIVE)
    string(APPEND kvfold_flags " -march=native")
endif()
# The commit of the sources, for whoever reads numbers of an installed package; empty where there is no repository.
if(NOT DEFINED KVFOLD_COMMIT)
    set(KVFOLD_COMMIT "")
    execute_process(COMMAND git rev-parse --show-toplevel WORKING_DIRECTORY "${CMAKE_SOURCE_DIR}"
                    OUTPUT_VARIABLE kvfold_top OUTPUT_STRIP_TRAILING_WHITESPACE ERROR_QUIET)
    if("${kvfold_top}" STREQUAL "${CMAKE_SOURCE_DIR}")
        execute_process(COMMAND git rev-parse --short=12 HEAD WORKING_DIRECTORY "${CMAKE_SOURCE_DIR}"
                        OUTPUT_VARIABLE KVFOLD_COMMIT OUTPUT_STRIP_TRAILING_WHITESPACE ERROR_QUIET)
        execute_process(COMMAND git status --porcelain -uno WORKING_DIRECTORY "${CMAKE_SOURCE_DIR}"
                        OUTPUT_VARIABLE kvfold_changes ERROR_QUIET)
        if(NOT "${kvfold_changes}" STREQUAL "")
            string(APPEND KVFOLD_COMMIT "+")
        endif()
    endif()
endif()
set_property(SOURCE "${kvfold_cpp}/bindings/register_build.cpp" PROPERTY COMPILE_DEFINITIONS
    KVFOLD_VERSION="${PROJECT_VERSION}" KVFOLD_COMMIT="${KVFOLD_COMMIT}" KVFOLD_PIN_VERSION="${KVFOLD_PIN_VERSION}" KVFOLD_PIN_COMMIT="${KVFOLD_PIN_COMMIT}"
    KVFOLD_COMPILER="${CMAKE_CXX_COMPILER_ID} ${CMAKE_CXX_COMPILER_VERSION}" KVFOLD_BUILD_TYPE="${CMAKE_BUILD_TYPE}"
    KVFOLD_FLAGS="${kvfold_flags}" KVFOLD_BACKENDS="${kvfold_backends}")

if(KVFOLD_DEV_LINKS)
    # Run from the checkout (PYTHONPATH=python): what the package has beside its Python files is linked there.
    set(kvfold_package "${CMAKE_SOURCE_DIR}/python/kvfold")
    file(CREATE_LINK "${CMAKE_BINARY_DIR}/bin" "${kvfold_package}/lib" SYMBOLIC)
    file(CREATE_LINK "${CMAKE_BINARY_DIR}/bin" "${kvfold_package}/bin" SYMBOLIC)
    add_custom_command(TARGET _core POST_BUILD COMMAND "${CMAKE_COMMAND}" -E create_symlink
        "$<TARGET_FILE:_core>" "${kvfold_package}/$<TARGET_FILE_NAME:_core>")
endif()
