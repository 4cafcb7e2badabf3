# Links of README.md and docs/*.md, for the files of the packages (tree.sh). Within a document (#), to the web and, once
# they are rewritten here, to the root they stay; whatever else is in the checkout only, and its words stand alone.
s#\]\((docs/)?(operations|store|sharing|engines|npu|protocol)\.md#](/usr/share/doc/kvbroker/\2.md.gz#g
s#\]\((\.\./)?include/kvbroker\.h\)#](/usr/include/kvbroker.h)#g
s#\]\(\.\./ggml-plugin/include/kvbroker-ggml\.h\)#](/usr/include/kvbroker-ggml.h)#g
s#\]\(\.\./ggml-plugin/examples/trim\.c\)#](/usr/share/doc/kvbroker-ggml/examples/trim.c)#g
s#\]\(examples/c\)#](/usr/share/doc/libkvbroker-dev/examples)#g
s#\]\((\.\./)?systemd/kvbroker\.toml\)#](/etc/kvbroker/kvbroker.toml)#g
s#\]\((\.\./)?systemd\)#](/usr/lib/systemd/system)#g
s#\]\((\.\./)?udev/60-kvbroker\.rules\)#](/usr/lib/udev/rules.d/60-kvbroker.rules)#g
s#\]\((\.\./)?dts\)#](/usr/share/kvbroker/overlays)#g
s#\[([^][]*)\]\([^/\#h][^)]*\)#\1#g
