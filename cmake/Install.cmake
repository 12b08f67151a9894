# The package: kvfold/_core, kvfold/lib (libraries) and kvfold/bin (programs), found by each other through relative run
# paths. Headers and CMake files of llama.cpp are not shipped.
foreach(target IN LISTS KVFOLD_LIBRARIES)
    set_target_properties(${target} PROPERTIES INSTALL_RPATH "$ORIGIN")
    set_property(TARGET ${target} PROPERTY PUBLIC_HEADER)
    set_property(TARGET ${target} PROPERTY PRIVATE_HEADER)
endforeach()
foreach(target IN LISTS KVFOLD_PROGRAMS)
    set_target_properties(${target} PROPERTIES INSTALL_RPATH "$ORIGIN/../lib")
endforeach()
install(TARGETS ${KVFOLD_LIBRARIES} COMPONENT kvfold
        LIBRARY DESTINATION kvfold/lib NAMELINK_SKIP
        RUNTIME DESTINATION kvfold/lib)
install(TARGETS ${KVFOLD_PROGRAMS} COMPONENT kvfold RUNTIME DESTINATION kvfold/bin)
if(KVFOLD_BINDINGS)
    set_target_properties(_core PROPERTIES INSTALL_RPATH "$ORIGIN/lib")
    install(TARGETS _core COMPONENT kvfold LIBRARY DESTINATION kvfold)
endif()
