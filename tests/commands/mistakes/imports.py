import os

import torchh
