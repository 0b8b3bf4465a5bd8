# recipe:python on the programs of this host: recipe:base with build tools and the usual libraries
# for data.
FROM recipe:base
RUN --mount=type=bind,target=/run/recipe sh /run/recipe/install.sh \
        gcc=build-essential g++=build-essential make=build-essential pkg-config
RUN python3 -m pip install --no-cache-dir --root-user-action ignore --ignore-installed \
        matplotlib numpy openpyxl pandas pillow requests scikit-learn
# The first chart would search for fonts.
RUN python3 -c 'import matplotlib.font_manager'
