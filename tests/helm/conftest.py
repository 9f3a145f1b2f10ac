"""Collected only by ``make helm-test`` (scripts/helm_test.sh), which brings helm and Kubernetes' schemas."""

import os

collect_ignore_glob = [] if "HELM_TEST_TOOLS" in os.environ else ["test_*.py"]
