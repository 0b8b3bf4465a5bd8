# recipe:python on Debian: recipe:base with build tools and the usual libraries for data.
FROM recipe:base
RUN apt-get update \
    && apt-get install -y --no-install-recommends \
        build-essential fonts-dejavu-core pkg-config python3-dev \
    && rm -rf /var/lib/apt/lists/* /var/cache/apt/*
RUN pip install --no-cache-dir --root-user-action ignore \
        matplotlib numpy openpyxl pandas pillow requests scikit-learn
# The first chart would search for fonts.
RUN python3 -c 'import matplotlib.font_manager'
